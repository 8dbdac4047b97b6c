module seckill/pkg

go 1.26

require (
	seckill/lua v0.0.0
	seckill/proto v0.0.0
)

require (
	github.com/oklog/ulid/v2 v2.1.2 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)

replace (
	seckill/lua => ../lua
	seckill/proto => ../proto
)
