// Package testkit gives tests real services: a corner of a shared Redis, RabbitMQ and MySQL that is
// cleaned up afterwards, private instances that may be killed, frozen or starved, and a TCP proxy
// that cuts or stalls a connection.
//
// A service that is missing fails the test and says which one; nothing is skipped.
//
// The shared services are found through SECKILL_TEST_REDIS_ADDR (127.0.0.1:6379),
// SECKILL_TEST_RABBITMQ_URL (amqp://guest:guest@127.0.0.1:5672/) and SECKILL_TEST_MYSQL_DSN
// (root@tcp(127.0.0.1:3306)/). A vhost is made through the management API when
// SECKILL_TEST_RABBITMQ_API names one, else through rabbitmqctl (another program or node with
// SECKILL_TEST_RABBITMQCTL).
package testkit
