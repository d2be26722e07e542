// A CUDA device that exists only by name.
//
// torch asks these two interfaces for the number of GPUs, the current device and its streams. With these answers it
// traces a model whose fake tensors are on cuda:0. Nothing can run on the device.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);

struct FakeGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

}  // namespace

// To be called after torch is imported: a CUDA build of torch registers a guard that needs a driver.
extern "C" void register_fake_guard() {
  static const FakeGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}

namespace at {

struct CUDAHooks : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return DEVICE.index(); }
  c10::DeviceIndex current_device() const override { return DEVICE.index(); }
  int getNumGPUs() const override { return 1; }
};

// A CUDA build of torch registers its hooks too, later and without this priority, and torch ignores them then.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, CUDAHooks);

}  // namespace at
