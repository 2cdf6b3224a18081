// The CUDA hooks that autograd asks before it runs a node for a CUDA tensor. torch asks for them early: preload this library.
//
// A CPU build has no hooks. A CUDA build registers its own, which find no device on a machine without a GPU and would touch the
// real one on a machine with a GPU. The registry keeps the hooks of the higher priority, whichever come first.
#include <ATen/detail/CUDAHooksInterface.h>

#include <memory>
#include <optional>

namespace {

struct FakeHooks : public at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 2; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
};

std::unique_ptr<at::CUDAHooksInterface> make_hooks(at::CUDAHooksArgs) { return std::make_unique<FakeHooks>(); }

const int registered = [] {
  at::CUDAHooksRegistry()->Register("CUDAHooks", make_hooks, c10::REGISTRY_PREFERRED);
  return 0;
}();

}  // namespace

namespace at::accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace at::accelerator
