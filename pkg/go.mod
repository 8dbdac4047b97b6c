module seckill/pkg

go 1.26

require (
	github.com/oklog/ulid/v2 v2.1.2
	go.yaml.in/yaml/v3 v3.0.4
)

replace (
	seckill/lua => ../lua
	seckill/proto => ../proto
)
