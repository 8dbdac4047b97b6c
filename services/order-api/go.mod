module seckill/services/order-api

go 1.26

require (
	seckill/lua v0.0.0
	seckill/pkg v0.0.0
	seckill/proto v0.0.0
)

replace (
	seckill/lua => ../../lua
	seckill/pkg => ../../pkg
	seckill/proto => ../../proto
)
