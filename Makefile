# `make` alone says what there is. Scripts are in deploy/local; their settings stand in its lib.sh.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

export GOTOOLCHAIN := local
BIN := $(CURDIR)/bin
TOOLS := $(BIN)/tools
RACE_COUNT ?= 3

.PHONY: help
help: ## this list
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

.PHONY: up
up: ## Redis, RabbitMQ and MySQL: uses what runs, else docker compose, else Debian's packages
	@deploy/local/up.sh

.PHONY: down
down: ## end what make up and make run started, and nothing else
	@deploy/local/down.sh

.PHONY: build
build: ## bin/order-api, bin/order-worker, bin/seckillctl
	@mkdir -p $(BIN)
	@for s in order-api order-worker seckillctl; do \
	  (cd services/$$s && go build -o $(BIN)/$$s .); \
	done

.PHONY: demo
demo: up build ## rehearse a sale: 2,000 units, 20,000 buyers, report, clean stop
	@deploy/local/demo.sh

.PHONY: run
run: up build ## both programs in the background, an open sale, and a curl that buys from it
	@deploy/local/run.sh

.PHONY: test
test: up ## all tests of all modules, race detector on
	@deploy/local/test.sh

.PHONY: race
race: up ## the same, each test RACE_COUNT times (3)
	@TEST_TIMEOUT=60m deploy/local/test.sh -count=$(RACE_COUNT)

.PHONY: chaos
chaos: up ## the crash tests: processes killed and servers stopped at the worst places
	@deploy/local/chaos.sh

.PHONY: bench
bench: ## measure the system beside a handler that does nothing (LONG=1: thorough; up to 5 min else)
	@mkdir -p $(BIN)
	@cd services/bench && go build -o $(BIN)/bench .
	@$(BIN)/bench run -root $(CURDIR) -out $(CURDIR)/bench-results $(if $(LONG),-long) $(BENCH_ARGS)

.PHONY: lint
lint: tools ## golangci-lint, buf, gofmt, tidiness, generated code
	@TOOLS=$(TOOLS) deploy/lint.sh

.PHONY: vulncheck
vulncheck: tools ## known vulnerabilities in what the modules reach (asks vuln.go.dev)
	@for dir in $$(go list -m -f '{{.Dir}}'); do (cd $$dir && $(TOOLS)/govulncheck ./...); done

.PHONY: generate
generate: tools ## Go code from proto/
	@cd proto && PATH=$(TOOLS):$$PATH $(TOOLS)/buf generate

.PHONY: tools
tools: $(TOOLS)/.done

# The tools have a module of their own, so that no service's graph grows by them. protoc-gen-go comes
# from proto's: generator and runtime are then the same version.
$(TOOLS)/.done: .tools/go.mod .tools/go.sum proto/go.mod
	@mkdir -p $(TOOLS)
	@cd .tools && GOWORK=off GOFLAGS= go build -o $(TOOLS)/ tool
	@cd proto && GOWORK=off GOFLAGS= go build -o $(TOOLS)/ google.golang.org/protobuf/cmd/protoc-gen-go
	@touch $@

.PHONY: clean
clean: down ## remove bin and the state of make up, data of the servers it started included
	@rm -rf $(BIN) .run
