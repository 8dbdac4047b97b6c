// Package sale is the plan of a flash sale as people write it (sale.yaml) and as the admin API takes
// it (the same fields as JSON): strict decoding, defaults, and a validation that names every problem
// at once. It does no I/O and knows neither Redis nor MySQL, so that the command line can check a
// plan with the very rules of the server.
package sale
