// Package stock is all of Redis: it reserves, confirms and releases units with one script each,
// and knows the life of an activity there (announce, warm, pause, end, clean up).
//
// Every key that one script touches carries the same hash tag {activity:bucket}.
package stock
