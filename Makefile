GO      ?= go
BIN     := bin
# Debian packages: make and git, the compiler for cgo, pkg-config, the header of RDMA devices and Python, network namespaces and traffic control, and what the peer programs are built and run with.
DEPS       := make git gcc g++ libc6-dev pkgconf libibverbs-dev python3-dev python3-venv iproute2 iputils-ping util-linux ca-certificates
PEER_DEPS  := libopenmpi-dev openmpi-bin libmpich-dev mpich libgloo-dev iperf3 ucx-utils
# What a target ends with that has skipped all of its tests: in CI that is an error.
UNLESS_CI   := [ "$$CI" != true ]
# What starts examples/launch.
LAUNCH_DEPS := slurm-wlm munge openmpi-bin mpich systemd
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
# The version of PyTorch that its backend is built for, in a virtual environment that is kept between runs.
TORCH       ?= 2.15.0
TORCH_ENV   ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tutti/torch-$(TORCH)
# NIXL, which bench-p2p compares with, the same way.
NIXL        := 1.5.1
NIXL_ENV    ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tutti/nixl
# Open MPI and MPICH as they are now, beside Debian's, the same way.
OPENMPI     := 5.0.11
MPICH       := 5.0.2
MPI_ENV     ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tutti/mpi
# The compiler of the kernels for CUDA devices, and NVIDIA's assembler, which checks them, in the user's cache.
CUDA_DEPS   := clang-19 g++ python3-venv
PTXAS       := 13.5.37
PTXAS_ENV   := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tutti/ptxas
# What tests/gpu/run.sh --sanitizer finds accesses outside of memory with, in the user's cache.
SANITIZER     := 13.5.25
SANITIZER_ENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tutti/sanitizer
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.9.0
# Only this needs root: what fills a cache is run as the user whose cache it is.
APT_GET     := $(if $(filter-out 0,$(shell id -u)),sudo )env DEBIAN_FRONTEND=noninteractive apt-get
# lint has vetted everything, and debugging information doubles the time of linking.
TEST        := $(GO) test -vet=off -ldflags=-w -count=1 -timeout 15m
# Without the packages in which nothing runs at the same time: pure functions and models of them, and kernels in C++.
NOT_RACED   := -e /examples -e /tests/ -e '^tutti/endpoint$$' -e '^tutti/pg$$' -e '^tutti/cmd/tutti$$' -e '^tutti/collectives$$' \
	-e '^tutti/pg/membership$$' -e '^tutti/pg/internal/resync$$' -e '^tutti/kernels/cuda$$'
# And the tests in the others of which the same is true.
ALONE       := ^Test(EveryLaneChange|LaneWalks|Model|MachineAndLedger|RandomWalks|RingIsReadAsItWasComposed|AnyMessages|RareSubnormals|ReducersMatchReference|ManyBlocksAreNotDeep)$$
RACE        := $(TEST) -short -race
# A half of the tests of pg, by time.
FIRST       := ^Test[A-D]
# The packages with tests that need an RDMA device: each boots the virtual machine of tests/softroce once.
RDMA_PKGS   := ./rdma/verbs ./rdma/endpoint ./rdma/queue ./p2p/verbs ./endpoint ./cmd/tutti ./cmd/tutti/internal/pair
# The packages whose tests take longest go first, so that none of them runs alone at the end. Many tests mostly wait.
LONGEST     := ./tests/faults ./pg
ABREAST     := -p 3
# Ranks that have to share their cores with other tests take several times as long, and endpoints under attack leave others little.
MATRIX      := ./tests/matrix
ATTACKED    := ./endpoint
# What compiles runs beside tests that mostly wait, and takes the time that they leave.
ASIDE       := nice -n 19
# The tests of pg that depend on kernels: nothing else there is compiled differently without assembly.
REDUCING    := Collectives|EveryAlgorithm|SameBits|SmallFloats|WideReductions

.PHONY: help build shim install torch test-torch test-c10d bench-torch deps-torch test tests-in-turn test-unit test-race race-attacked race-compile race-pg-first race-pg-second race-others test-purego test-pytorch test-rdma test-softroce test-gpu deps-rdma deps-cuda deps-gpu lint lint-aside vuln fmt generate torture torture-brief stalls mutants bench bench-peers bench-ranks bench-scale bench-p2p bench-rdma bench-against plots deps deps-peers clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

build: ## bin/tutti and all packages
	$(GO) build ./...
	$(GO) build -o $(BIN)/tutti ./cmd/tutti

# Without debugging information, which is a third of it. Only tutti_* is exported, and the library stays loaded once it is: the Go runtime cannot end.
SHIM_LDFLAGS := -Wl,--version-script=$(CURDIR)/shim/tutti.map -Wl,-z,nodelete -Wl,-soname,libtutti.so
# What tutti_version returns: the tag of this commit, "devel" without one. It is a flag of all C code, so that another one builds that anew.
SHIM_VERSION = $(shell git describe --tags --exact-match --dirty 2>/dev/null)

shim: ## the C library: bin/libtutti.so and its headers
	@mkdir -p $(BIN)
	$(if $(SHIM_VERSION),CGO_CFLAGS="$$($(GO) env CGO_CFLAGS) -DTUTTI_VERSION=\"$(SHIM_VERSION)\"") $(GO) build -buildmode=c-shared -ldflags '-w -extldflags "$(SHIM_LDFLAGS)"' -o $(BIN)/libtutti.so ./shim
	rm -f $(BIN)/libtutti.h
	cp shim/tutti.h shim/tutti_dl.h $(BIN)/

PREFIX    ?= /usr/local
# Where the files go now: a package is made of those in DESTDIR, and has them in PREFIX.
INSTALLED = $(DESTDIR)$(abspath $(PREFIX))

# It builds nothing, so that root needs no Go.
install: ## after make build shim: bin/tutti, the C library and tutti.pc to PREFIX, /usr/local without one (DESTDIR counts)
	@for file in tutti libtutti.so tutti.h tutti_dl.h; do [ -e $(BIN)/$$file ] || { \
		echo "there is no $(BIN)/$$file: run make build shim first" >&2; exit 1; }; done
	install -d $(INSTALLED)/bin $(INSTALLED)/lib/pkgconfig $(INSTALLED)/include
	install $(BIN)/tutti $(INSTALLED)/bin/
	install -m 644 $(BIN)/libtutti.so $(INSTALLED)/lib/
	install -m 644 $(BIN)/tutti.h $(BIN)/tutti_dl.h $(INSTALLED)/include/
	install -m 644 shim/tutti.pc.in $(INSTALLED)/lib/pkgconfig/tutti.pc
	sed -i 's|@PREFIX@|$(abspath $(PREFIX))|' $(INSTALLED)/lib/pkgconfig/tutti.pc

torch: shim deps-torch ## the PyTorch backend, shim/torch, for torch $(TORCH) (TORCH=2.5.1 for another one)
	@cd shim/torch && TUTTI_OBJECTS=$(CURDIR)/.build/torch $(TORCH_ENV)/bin/python -m tutti_torch.build

# FALLBACK=1 does not use the C++ module.
WITHOUT_MODULE = $(if $(FALLBACK),TUTTI_TORCH_CTYPES=1)

test-torch: torch ## the tests of the PyTorch backend, each in processes of its own (FALLBACK=1: without the C++ module)
	$(GO) build -o $(BIN)/tutti ./cmd/tutti
	cd shim/torch/tests && PYTHONPATH=.. $(WITHOUT_MODULE) $(TORCH_ENV)/bin/python run.py

test-c10d: torch ## PyTorch's own tests of a backend, 3 ranks (C10D_FLAGS="-k all_reduce", "--third 0"; FALLBACK=1)
	cd shim/torch/tests && PYTHONPATH=..:. $(WITHOUT_MODULE) $(TORCH_ENV)/bin/python run_c10d_suite.py tutti $(C10D_FLAGS)

bench-torch: torch ## Tutti beside Gloo from Python (BENCH_FLAGS="--floor", "--ddp", "--sizes 64 1M")
	cd shim/torch && PYTHONPATH=. $(TORCH_ENV)/bin/python bench.py --json $(CURDIR)/.build/torch.json $(BENCH_FLAGS)

test: ## lint, and all tests; names what was skipped and why
	@$(MAKE) --no-print-directory -j2 tests-in-turn lint-aside

tests-in-turn:
	@for target in test-unit test-purego test-softroce test-pytorch; do $(MAKE) --no-print-directory $$target || exit; done

# In one piece when it has ended.
lint-aside:
	@out=$$(mktemp); trap 'rm -f $$out' EXIT; $(ASIDE) $(MAKE) --no-print-directory lint >$$out 2>&1; code=$$?; cat $$out; exit $$code

test-unit: ## all tests, also those of several processes and hosts
	@$(GO) run ./tests/report -- $(TEST) -p 1 $(MATRIX) $(ATTACKED)
	@$(GO) run ./tests/report -- $(TEST) -short ./endpoint -endpoint.rdma
	@all=$$($(GO) list ./...) && $(GO) run ./tests/report -- $(TEST) $(ABREAST) $(LONGEST) \
		$$(echo "$$all" | grep -v -e /tests/matrix -e '^tutti/endpoint$$')
	cd tests/kubernetes && $(GO) test -count=1 ./...

# Each process would sleep a second before it exits, to see what its other goroutines do until then.
test-race: export GORACE := atexit_sleep_ms=0 $(GORACE)
test-race: ## the short tests of most packages again, with the race detector; CI runs it after test
	@$(MAKE) --no-print-directory -j2 -O race-attacked race-compile
	@$(MAKE) --no-print-directory -j3 -O race-pg-first race-pg-second race-others

race-attacked:
	@$(GO) run ./tests/report -- $(RACE) $(ATTACKED)
# What the targets below need.
race-compile:
	@$(ASIDE) $(GO) list -race -test -deps -export ./pg ./cmd/tutti $$($(GO) list ./... | grep -v $(NOT_RACED)) >/dev/null

# The tests of pg take as long as all others, and mostly wait: two processes run half of them each.
race-pg-first:
	@$(GO) run ./tests/report -- $(RACE) -run '$(FIRST)' ./pg
race-pg-second:
	@$(GO) run ./tests/report -- $(RACE) -skip '$(FIRST)|$(ALONE)' ./pg
race-others:
	@all=$$($(GO) list ./...) && $(GO) run ./tests/report -- $(RACE) -p 2 -skip '$(ALONE)' ./cmd/tutti \
		$$(echo "$$all" | grep -v $(NOT_RACED))

test-purego: ## build and test without cgo and without assembly
	CGO_ENABLED=0 $(GO) build ./...
	@CGO_ENABLED=0 $(GO) run ./tests/report -- $(TEST) -short -tags purego -run '$(REDUCING)' ./pg
	@CGO_ENABLED=0 $(GO) run ./tests/report -- $(TEST) -short -tags purego ./kernels ./collectives ./device/cuda ./pg/internal/exec ./p2p/inproc ./p2p/shm

test-pytorch: ## test-torch beside test-c10d, if make deps-torch has been run
	@if [ -e $(TORCH_ENV)/complete ]; then $(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j2) -O test-torch test-c10d; else \
		echo "skipped: the PyTorch backend and PyTorch's own tests of it: there is no torch $(TORCH) in $(TORCH_ENV) (make deps-torch)"; \
		$(UNLESS_CI); fi

test-rdma: ## the tests that need an RDMA device, in a virtual machine with Soft-RoCE
	@tests/softroce/setup.sh >/dev/null
	@$(GO) run ./tests/report -- $(TEST) -p 1 -exec $(CURDIR)/tests/softroce/vmexec -run '^TestDevice' $(RDMA_PKGS)

test-softroce: ## test-rdma, if make deps-rdma has been run
	@if why=$$(tests/softroce/setup.sh --check 2>&1 >/dev/null); then $(MAKE) --no-print-directory test-rdma; else \
		echo "skipped: the tests of RDMA devices: $$why"; $(UNLESS_CI); fi

test-gpu: ## the tests of a GPU, on this machine's, with a table of bandwidths
	@tests/gpu/run.sh

torture: ## random programs over the public API, for hours (TORTURE_FLAGS="-torture.duration 8h -torture.transport tcp"); what they find is in .build/torture
	$(GO) test ./tests/torture -run '^TestTorture$$' -count=1 -v -timeout 0 -torture.duration 4h -torture.out $(CURDIR)/.build/torture $(TORTURE_FLAGS)

torture-brief: ## two minutes of it, with a seed that the commit gives
	@$(GO) run ./tests/report -- $(TEST) ./tests/torture -run '^TestTorture$$' -torture.duration 2m -torture.shrink 30s \
		-torture.seed 0x$$(git rev-parse --short=15 HEAD 2>/dev/null || echo 1) $(TORTURE_FLAGS)

stalls: ## the tests of pg while random processes of them stand still for up to 0.9 s (STALLS_FLAGS="-run 'Split.*' ./p2p/shm")
	@$(GO) build -o .build/stalls ./tests/stalls
	@$(GO) run ./tests/report -- $(TEST) -timeout 30m -exec $(CURDIR)/.build/stalls $(or $(STALLS_FLAGS),./pg)

mutants: ## plant mistakes in the library and have the torture find each within 3 minutes (MUTANTS_FLAGS="-run 'key-.*'")
	$(GO) run ./tests/torture/mutants $(MUTANTS_FLAGS)

lint: ## gofmt, the widths of lines, vet, staticcheck, and that generated code is current
	@files=$$(gofmt -l .) || exit; test -z "$$files" || { echo "not formatted:"; echo "$$files"; exit 1; }
	$(GO) run ./tests/widths
	$(GO) vet ./...
	CGO_ENABLED=0 GOARCH=arm64 $(GO) vet ./kernels ./collectives ./p2p/... ./bootstrap/... ./pg/... ./cmd/...
	CGO_ENABLED=0 GOARCH=riscv64 $(GO) vet ./kernels ./p2p/...
	$(GO) run $(STATICCHECK) ./...
	@d=$$(mktemp -d) && trap 'rm -rf $$d' EXIT && cd kernels && $(GO) run ./internal/gen -asm $$d/kernels_amd64.s -decl $$d/kernels_amd64.go -pkg kernels && \
	for f in kernels_amd64.s kernels_amd64.go; do \
		tail -n +2 $$d/$$f >$$d/new; tail -n +2 $$f | cmp -s $$d/new || { echo "kernels/$$f is not what internal/gen writes: run make generate"; exit 1; }; \
	done
	$(GO) test -run TestReadmeTables ./cmd/tutti

vuln: ## known vulnerabilities in what the module links, if the database can be reached
	@GOBIN=$(CURDIR)/.build/bin $(GO) install $(GOVULNCHECK)
	@$(GO) run ./tests/vuln .build/bin/govulncheck ./...

fmt: ## format
	gofmt -w .

generate: ## the SIMD kernels, the CUDA kernels (make deps-cuda), README's tables
	$(GO) generate ./...
	$(GO) test -count=1 -run TestReadmeTables ./cmd/tutti -update

bench: build ## the nccl-tests table of every operation on this machine
	$(BIN)/tutti bench -n 2 --op all --max 4M

bench-peers: ## Tutti beside Open MPI, MPICH, Gloo and the memory limit; fails if a bar is missed (PEERS_FLAGS=--quick)
	$(GO) run ./tests/peers --mpi $(MPI_ENV) --json .build/peers.json $(PEERS_FLAGS)

bench-ranks: ## an allreduce of many ranks beside Open MPI; fails if a bar is missed (RANKS_FLAGS="--ranks 64")
	$(GO) run ./tests/peers --mpi $(MPI_ENV) --json .build/ranks.json --ops allreduce --transports shm --ranks 8,16,64 \
		--sizes 64,512,4K,32K --peers openmpi,openmpi5,tutti $(RANKS_FLAGS)

bench-scale: ## many processes, many messages and small floats beside their bars; fails if one is missed (SCALE_FLAGS="--parts start --ranks 64")
	$(GO) run ./tests/scale --json .build/scale.json $(SCALE_FLAGS)

bench-p2p: ## endpoints beside plain TCP, iperf3, UCX and NIXL; fails if a bar is missed (P2P_FLAGS="--sizes 64,1M --rounds 3")
	$(GO) run ./tests/peers p2p --nixl $(NIXL_ENV) $(P2P_FLAGS)

bench-rdma: ## writes over rdma/queue beside ib_write_bw and ib_write_lat, and the times of connections and of links that come back (RDMA_FLAGS="-rounds 3")
	@tests/softroce/setup.sh >/dev/null
	@$(GO) build -o .build/rdmabench ./tests/rdmabench
	@tests/softroce/vmexec .build/rdmabench $(RDMA_FLAGS)
	@$(GO) test -count=1 -v -run '^TestSimultaneousOpens$$' ./rdma/endpoint -bars
	@$(GO) test -p 1 -count=1 -v -exec $(CURDIR)/tests/softroce/vmexec -run '^TestDevice(LinkDownAndUp|Returns)$$' \
		./rdma/endpoint ./p2p/verbs -bars
	@VMLIMIT=900 $(GO) test -count=1 -v -timeout 15m -exec $(CURDIR)/tests/softroce/vmexec \
		-run '^TestDevice(SimultaneousOpens|KilledProcesses)$$' ./rdma/endpoint -opens 10000 -kills 25

bench-against: ## this tree beside commit BASE; fails if a row is slower beyond its interval (AGAINST_FLAGS=--help)
	$(GO) run ./tests/against $(AGAINST_FLAGS) $(BASE)

plots: ## draw docs/plots/*.svg from what bench-peers and bench-torch measured last
	$(GO) run ./tests/plots -o docs/plots $$(ls .build/peers.json .build/torch.json 2>/dev/null)

deps: ## install the Debian packages that building and testing need (as root, or by sudo)
	$(APT_GET) update -qq
	$(APT_GET) install -y -qq --no-install-recommends $(DEPS) $(LAUNCH_DEPS)

# Under `sudo make` it would be root's cache that is filled.
.PHONY: own-cache
own-cache:
	@case $${SUDO_COMMAND%% *} in make | */make) \
		echo "run it without sudo: it fills your cache, and calls sudo for apt-get" >&2; exit 1 ;; esac

deps-peers: own-cache deps ## also those of bench-peers and bench-p2p; NIXL, 250 MB, in $(NIXL_ENV) and MPI libraries, 90 MB, in $(MPI_ENV), once
	$(APT_GET) install -y -qq --no-install-recommends $(PEER_DEPS)
	@tests/peers/nixl.sh $(NIXL) $(NIXL_ENV)
	@tests/peers/mpi.sh $(OPENMPI) $(MPICH) $(MPI_ENV)

deps-rdma: ## a virtual machine with Soft-RoCE from Debian's packages in the user's cache, 170 MB, once; nothing is installed
	@tests/softroce/setup.sh

deps-cuda: own-cache ## what compiles the kernels for CUDA devices, and ptxas $(PTXAS) in $(PTXAS_ENV), 200 MB, once
	$(APT_GET) update -qq
	$(APT_GET) install -y -qq --no-install-recommends $(CUDA_DEPS)
	@kernels/cuda/package.sh nvidia-cuda-nvcc $(PTXAS) ptxas $(PTXAS_ENV)

deps-gpu: ## compute-sanitizer $(SANITIZER) for tests/gpu/run.sh --sanitizer in $(SANITIZER_ENV), 60 MB, once
	@kernels/cuda/package.sh nvidia-cuda-sanitizer-api $(SANITIZER) compute-sanitizer $(SANITIZER_ENV)

deps-torch: ## a virtual environment with torch $(TORCH) in $(TORCH_ENV), several GB, once
	@shim/torch/deps.sh $(TORCH) $(TORCH_ENV)

clean: ## remove what building left
	rm -rf $(BIN) .build
