// The C interface in C++: a group, and works, that release themselves, and errors as exceptions.
//
//     c++ raii.cc $(pkg-config --cflags --libs tutti) -o raii
//     tutti run -n 4 -- ./raii
//
// This needs an installed library: docs/c.md says how, and how to do without.
#include <cstdio>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tutti.h"

namespace {

class Error : public std::runtime_error {
public:
	Error(int code, const std::string &text) : std::runtime_error(text), code(code) {}
	const int code;
};

void check(int code)
{
	if (code != TUTTI_OK)
		throw Error(code, std::string(tutti_code_name(code)) + ": " + tutti_last_error());
}

// Work is a started operation. Its buffers must outlive the operation, not the Work.
class Work {
public:
	explicit Work(tutti_work work) : work_(work) {}
	Work(Work &&other) noexcept : work_(std::exchange(other.work_, 0)) {}
	Work(const Work &) = delete;
	Work &operator=(Work other) noexcept
	{
		std::swap(work_, other.work_);
		return *this;
	}
	~Work() { tutti_work_release(work_); }
	void wait() { check(tutti_work_wait(work_, -1)); }

private:
	tutti_work work_;
};

class Group {
public:
	explicit Group(const tutti_config *config = nullptr) { check(tutti_join(config, &group_)); }
	Group(Group &&other) noexcept : group_(std::exchange(other.group_, 0)) {}
	Group(const Group &) = delete;
	Group &operator=(const Group &) = delete;
	~Group() { tutti_close(group_); }

	int rank() const
	{
		int32_t rank;
		check(tutti_rank(group_, &rank));
		return rank;
	}
	int size() const
	{
		int32_t size;
		check(tutti_size(group_, &size));
		return size;
	}
	Group split(int color, int key) const
	{
		tutti_group sub;
		check(tutti_split(group_, color, key, 0, &sub));
		return Group(sub);
	}
	Work sum(std::vector<double> &x) const
	{
		tutti_op op = tutti_op_allreduce(x.data(), x.data(), x.size(), TUTTI_FLOAT64, TUTTI_SUM);
		tutti_work work;
		check(tutti_start(group_, &op, &work));
		return Work(work);
	}
	void broadcast(std::vector<double> &x, int root) const
	{
		check(tutti_broadcast(group_, x.data(), x.size(), TUTTI_FLOAT64, root));
	}

private:
	explicit Group(tutti_group group) : group_(group) {}
	tutti_group group_ = 0;
};

} // namespace

int main()
{
	try {
		Group all;
		std::vector<double> x(100, all.rank()), y(100, 1);
		Work first = all.sum(x), second = all.sum(y); // they run in this order
		second.wait();
		first.wait();
		Group pair = all.split(all.rank() / 2, 0); // ranks 0 and 1, 2 and 3, ...
		pair.sum(y).wait();
		try {
			all.broadcast(y, all.size()); // there is no such rank
			return 1;
		} catch (const Error &e) {
			if (e.code != TUTTI_EINVAL)
				throw;
		}
		std::printf("rank %d of %d: %g %g\n", all.rank(), all.size(), x[0], std::accumulate(y.begin(), y.end(), 0.0));
	} catch (const std::exception &e) {
		std::fprintf(stderr, "%s\n", e.what());
		return 1;
	}
}
