// Package activity makes sales and opens them: it writes the plan and its stock to MySQL, announces the
// sale to Redis, warms it up (R9), pauses and resumes it, and keeps announcing what Redis has lost.
//
// A warm-up takes a number in MySQL, writes all buckets closed, wins in MySQL, and then opens the buckets
// that carry its number. Whatever dies between two of these steps leaves a sale that sells nothing until
// the next call, or the background loop, goes on from there.
package activity
