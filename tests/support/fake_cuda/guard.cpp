// A device guard for CUDA that does nothing: fake tensors ask for one, and never use the device that it would guard.
// `install` replaces the guard of a CUDA build, which calls the driver.
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct NoGuard final : public c10::impl::DeviceGuardImplInterface {
  static thread_local c10::DeviceIndex current;

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, current); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    current = device.index();
    return before;
  }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Stream getStream(c10::Device device) const override {
    c10::Device own(c10::DeviceType::CUDA, device.index() < 0 ? current : device.index());
    return c10::Stream(c10::Stream::DEFAULT, own);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

thread_local c10::DeviceIndex NoGuard::current = 0;
NoGuard guard;

}  // namespace

extern "C" void install() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
