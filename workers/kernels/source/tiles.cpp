// Whether the system lets this process use the processor's matrix tiles.
#include "tiles.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace {

#if defined(__AMX_BF16__)
// linux/x86: asm/prctl.h, since 5.16. Granted for all threads of the process, and for its children.
constexpr int ARCH_REQ_XCOMP_PERM = 0x1023;
constexpr int XFEATURE_XTILEDATA = 18;

bool request() { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }
#else
bool request() { return false; }
#endif

const bool granted = request();

}  // namespace

bool use_tiles = granted;

// Whether kernels use tiles from now on, if they can: tests and benchmarks compare both ways. Call it while no kernel
// runs. Returns whether they do.
extern "C" int set_tiles(int wanted) { return use_tiles = wanted != 0 && granted; }

extern "C" int has_tiles() { return use_tiles; }
