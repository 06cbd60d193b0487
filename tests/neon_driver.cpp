// Performs the steps in a file and writes what they left: a machine without Python stands in for the kernel's tests.
//
//     neon_driver IN OUT [--interface]
//
// IN: five int64 (tasks, bytes of a task, pointers of a task, bytes of memory, threads), the offsets of the pointers (int64),
// the tasks, the memory. A pointer is a place in the memory plus one; zero is null. OUT: the tasks, then the memory.
// With --interface OUT is the kernel's description of itself, and its instruction set on a line of its own.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../csrc/abi.h"

namespace {

void check(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "neon_driver: %s\n", what);
    std::exit(1);
}

template <class T>
std::vector<T> read(std::FILE* file, size_t count) {
    std::vector<T> all(count);
    check(std::fread(all.data(), sizeof(T), count, file) == count, "the input ends early");
    return all;
}

}  // namespace

int main(int argc, char** argv) {
    check(argc >= 3, "IN OUT [--interface]");
    std::FILE* const out = std::fopen(argv[2], "wb");
    check(out, "cannot write the output");
    if (argc > 3) {
        std::fprintf(out, "%s\n%s", ml_instruction_set(), ml_interface());
        return std::fclose(out);
    }
    std::FILE* const in = std::fopen(argv[1], "rb");
    check(in, "cannot read the input");
    const auto header = read<int64_t>(in, 5);
    check(header[1] == (int64_t)sizeof(MlTask), "tasks are of another size here");
    const auto pointers = read<int64_t>(in, (size_t)header[2]);
    auto tasks = read<MlTask>(in, (size_t)header[0]);
    const auto stored = read<char>(in, (size_t)header[3]);
    char* const memory = (char*)std::aligned_alloc(64, ((size_t)header[3] + 127) / 64 * 64);
    std::memcpy(memory, stored.data(), stored.size());
    for (MlTask& task : tasks)
        for (const int64_t offset : pointers) {
            uint64_t place;
            std::memcpy(&place, (char*)&task + offset, sizeof place);
            const char* const address = place ? memory + (place - 1) : nullptr;
            std::memcpy((char*)&task + offset, &address, sizeof address);
        }
    ml_step(tasks.data(), header[0], (int32_t)header[4], 0);
    check(std::fwrite(tasks.data(), sizeof(MlTask), tasks.size(), out) == tasks.size(), "cannot write the tasks");
    check(std::fwrite(memory, 1, stored.size(), out) == stored.size(), "cannot write the memory");
    std::free(memory);
    std::fclose(in);
    return std::fclose(out);
}
