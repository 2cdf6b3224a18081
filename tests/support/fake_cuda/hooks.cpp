// What autograd asks of a CUDA build before it runs a node for a CUDA tensor. It has to be there before torch is: preload it.
#include <ATen/detail/CUDAHooksInterface.h>

#include <optional>

namespace at {

struct CUDAHooks : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 2; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

namespace accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace accelerator

}  // namespace at
