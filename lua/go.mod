module seckill/lua

go 1.26
