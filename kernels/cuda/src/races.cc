// A program that runs every kernel with blocks on several threads, for ThreadSanitizer. It fails if
// a result depends on the number of threads.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels.cu"

static const unsigned kGrid = 7, kBlock = 32, kWorkers = 4;

static u64 address(const void *p) { return u64(reinterpret_cast<uintptr_t>(p)); }

// elementSize returns the bytes of an element of a kernel, from its name.
static u32 elementSize(const std::string &name) {
	if (name == "tutti_copy_packets")
		return 8;
	for (const char *ending : {"int8", "bits", "bool", "bytes", "e4m3", "e5m2"})
		if (name.find(ending) != name.npos)
			return 1;
	return name.find("64") != name.npos ? 8 : name.find("32") != name.npos ? 4 : 2;
}

// reduceOnce returns the destination after a reduction of the first sources; in place it is one.
template <class P, class Kernel>
static std::vector<Vector> reduceOnce(const Kernel &k, u32 size, u32 sources, bool inPlace, bool aligned,
                                      unsigned workers) {
	const u64 vectors = 3 * kGrid * kBlock + 5;
	std::mt19937_64 random(size * 100 + sources);
	std::vector<std::vector<Vector>> buffers(sources + 1, std::vector<Vector>(vectors + 2));
	for (auto &b : buffers)
		for (auto &v : b)
			v = Vector{u32(random()), u32(random()), u32(random()), u32(random())};
	const u32 head = 16 / size - 1; // elements before the vectors
	P p = {};
	for (u32 s = 0; s < sources; s++)
		p.src[s] = address(buffers[s].data()) + size;
	p.dst = inPlace ? p.src[sources - 1] : address(buffers[sources].data()) + size;
	p.n = head + vectors * 16 / size + 1;
	p.head = head;
	p.vectors = aligned ? vectors : 0;
	p.sources = sources;
	p.flags = kNatural | kDivide | kRound;
	p.divisor = size == 8 ? as<u64>(3.0) : as<u32>(3.0f);
	p.magic = ~0ull / 3 + 1;
	tutti_host_workers = workers;
	k.run(&p, kGrid, kBlock, 0);
	return buffers[inPlace ? sources - 1 : sources];
}

// placedOnce is reduceOnce with a place.
static std::vector<Vector> placedOnce(const tutti_host_kernel &k, u32 size, u32 sources, bool inPlace, bool aligned,
                                      unsigned workers) {
	struct Launcher {
		const tutti_host_kernel &k;
		void run(const void *params, unsigned grid, unsigned block, unsigned) const {
			const FewSources &p = *static_cast<const FewSources *>(params);
			Place place = {};
			place.kind = kReduction;
			place.dst = p.dst, place.n = p.n, place.vectors = p.vectors, place.flip = p.flip, place.divisor = p.divisor;
			place.magic = p.magic, place.head = p.head, place.sources = p.sources, place.flags = p.flags;
			for (u32 s = 0; s < p.sources; s++)
				place.src[s] = p.src[s];
			const PlaceParams at = {address(&place)};
			k.run(&at, grid, block, 0);
		}
	};
	return reduceOnce<FewSources>(Launcher{k}, size, sources, inPlace, aligned, workers);
}

template <class Once>
static bool reduces(const tutti_host_kernel &k, u32 most, Once once) {
	const u32 size = elementSize(k.name);
	for (u32 sources : {1u, 2u, 3u, most})
		for (bool inPlace : {false, true})
			for (bool aligned : {false, true}) {
				auto got = once(k, size, sources, inPlace, aligned, kWorkers);
				auto want = once(k, size, sources, inPlace, aligned, 1);
				if (memcmp(got.data(), want.data(), got.size() * sizeof(Vector)) != 0) {
					fprintf(stderr, "%s of %u sources: %u threads yield something else than one\n", k.name, sources,
					        kWorkers);
					return false;
				}
			}
	return true;
}

static bool copies(const tutti_host_kernel &k, bool placed) {
	std::vector<u8> src(50001), dst(src.size());
	for (size_t i = 0; i < src.size(); i++)
		src[i] = u8(i * 7);
	for (u32 unit = 1; unit <= 16; unit *= 2) {
		CopyParams p = {address(dst.data()), address(src.data()), src.size(), 0, unit};
		std::fill(dst.begin(), dst.end(), 0);
		tutti_host_workers = kWorkers;
		Place place = {};
		place.kind = kCopies, place.copies = 2;
		const u64 half = p.n / 2 / unit * unit, halves[] = {p.dst, p.src, half, p.dst + half, p.src + half, p.n - half};
		std::copy(std::begin(halves), std::end(halves), place.src);
		const PlaceParams at = {address(&place)};
		k.run(placed ? static_cast<const void *>(&at) : &p, kGrid, kBlock, 0);
		if (src != dst) {
			fprintf(stderr, "%s in units of %u bytes: the copy is another\n", k.name, unit);
			return false;
		}
	}
	return true;
}

// exchanges has ranks on threads of their own exchange messages in packets, several times, in two
// rounds each. Their results are the same.
static bool exchanges(const tutti_host_kernel &k) {
	const u32 ranks = 3, calls = 6, size = elementSize(k.name), n = 500;
	const u64 slot = (n * size / 2 + 15) / 8 * 16;
	std::vector<std::vector<Vector>> inboxes(ranks, std::vector<Vector>(2 * ranks * slot / 16));
	std::vector<std::vector<u64>> results(ranks, std::vector<u64>(ranks * calls * n));
	std::vector<std::vector<u32>> numbers(ranks, std::vector<u32>(1 + slot / 16));
	u64 words[6] = {};
	std::vector<std::thread> threads;
	tutti_host_workers = 1;
	for (u32 rank = 0; rank < ranks; rank++)
		threads.emplace_back([&, rank] {
			std::mt19937_64 random(rank);
			std::vector<u64> src(n);
			for (u32 call = 1; call <= calls; call++) {
				for (auto &v : src)
					v = random();
				PacketParams p = {};
				p.dst = address(&results[rank][(call - 1) * ranks * n]);
				p.src = address(src.data());
				p.n = n;
				p.slot = slot;
				p.calls = address(numbers[rank].data());
				p.words = address(words);
				p.limit = 60000000000;
				p.ranks = ranks;
				p.rank = rank;
				p.root = ranks;
				p.marks[0] = 7 << kNumberBits, p.marks[1] = 5 << kNumberBits;
				p.flags = kNatural;
				p.to = n * size;
				for (u32 r = 0; r < ranks; r++)
					p.part[r] = r, p.inbox[r] = address(inboxes[r].data());
				k.run(&p, 2, kBlock, 0);
			}
		});
	for (auto &t : threads)
		t.join();
	const bool failed = words[1] != 0 || words[2] != 0;
	if (failed || results[0] != results[1] || results[0] != results[2])
		fprintf(stderr, "%s: the results of the ranks differ\n", k.name);
	return !failed && results[0] == results[1] && results[0] == results[2];
}

// hands passes plain memory from a thread to another and back, by words. The other one tells of its
// part by the word of a place as well.
static bool hands(const tutti_host_kernel &wait, const tutti_host_kernel &write, const tutti_host_kernel &tell) {
	u64 there = 0, back = 0, again = 0, data = 0;
	Place place = {};
	const u64 rounds = 200;
	std::thread other([&] {
		for (u64 i = 1; i <= rounds; i++) {
			WordParams arrived = {address(&there), i};
			wait.run(&arrived, 1, 1, 0);
			data++;
			place.word = i % 2 ? address(&again) : 0;
			place.value = i;
			const TellParams done = {address(&place), address(&back), i};
			tell.run(&done, 1, 1, 0);
		}
	});
	for (u64 i = 1; i <= rounds; i++) {
		WordParams sent = {address(&there), i}, answered = {address(&back), i};
		data++;
		write.run(&sent, 1, 1, 0);
		wait.run(&answered, 1, 1, 0);
	}
	other.join();
	const bool good = data == 2 * rounds && again == rounds - 1;
	if (!good)
		fprintf(stderr, "%llu additions, the latest one of %llu, want %llu and %llu\n", data, again, 2 * rounds,
		        rounds - 1);
	return good;
}

int main() {
	const tutti_host_kernel *wait = nullptr, *write = nullptr, *tell = nullptr;
	int run = 0;
	for (auto k = tutti_host_kernels; k->name != nullptr; k++, run++) {
		const std::string name = k->name;
		bool good = true;
		if (name == "tutti_wait")
			wait = k;
		else if (name == "tutti_write")
			write = k;
		else if (name == "tutti_tell")
			tell = k;
		else if (name == "tutti_copy" || name == "tutti_copy_placed")
			good = copies(*k, k->params == sizeof(PlaceParams));
		else if (k->params == sizeof(FewSources))
			good = reduces(*k, 8, reduceOnce<FewSources, tutti_host_kernel>);
		else if (k->params == sizeof(ManySources))
			good = reduces(*k, 11, reduceOnce<ManySources, tutti_host_kernel>);
		else if (k->params == sizeof(PlaceParams))
			good = reduces(*k, 11, placedOnce);
		else if (k->params == sizeof(PacketParams))
			good = exchanges(*k);
		else
			good = false, fprintf(stderr, "%s: this program does not know its parameter\n", k->name);
		if (!good)
			return 1;
	}
	if (wait == nullptr || write == nullptr || tell == nullptr || !hands(*wait, *write, *tell))
		return 1;
	printf("%d kernels\n", run);
}
