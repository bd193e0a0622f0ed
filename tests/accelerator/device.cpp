// A kind of device that torch does not have (PrivateUse1), with memory that only its own functions may touch: an address of it is
// FAR away from the bytes. Every operation but copies and views runs on the CPU, on copies.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <cstring>

namespace {

constexpr std::ptrdiff_t FAR = std::ptrdiff_t(1) << 46;
constexpr auto KIND = c10::DeviceType::PrivateUse1;

struct Memory final : c10::Allocator {
    static void release(void* shown) {
        if (shown != nullptr) c10::free_cpu(static_cast<char*>(shown) - FAR);
    }
    c10::DataPtr allocate(size_t nbytes) override {
        void* shown = nbytes == 0 ? nullptr : static_cast<char*>(c10::alloc_cpu(nbytes)) + FAR;
        return {shown, shown, &release, c10::Device(KIND, 0)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t nbytes) const override {
        std::memcpy(static_cast<char*>(to) - FAR, static_cast<const char*>(from) - FAR, nbytes);
    }
};

Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = KIND;
    c10::DeviceType type() const override { return KIND; }
    c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
    c10::Device getDevice() const override { return c10::Device(KIND, 0); }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
    c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
Hooks hooks;

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
    const auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_strided_generic(
        C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor bytes_of(const at::Tensor& tensor) {
    const auto offset = tensor.is_cpu() || tensor.data_ptr() == nullptr ? 0 : FAR;
    const auto options = at::TensorOptions().dtype(tensor.scalar_type());
    return at::from_blob(static_cast<char*>(tensor.data_ptr()) - offset, tensor.sizes(), tensor.strides(), options);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
    auto there = bytes_of(target);
    there.copy_(bytes_of(self).expand(target.sizes()));
    return target;
}

at::Tensor copy_and_resize(const at::Tensor& self, const at::Tensor& target) {
    if (target.sizes() != self.sizes()) {
        const auto fresh = at::empty_strided(self.sizes(), self.strides(), self.options().device(target.device()));
        target.unsafeGetTensorImpl()->shallow_copy_from(fresh.getIntrusivePtr());
    }
    return copy_from(self, target, false);
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }

at::Tensor& set_storage(at::Tensor& result, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::set_storage_cpu_(result, storage, offset, size, stride);
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    at::RegisterPrivateUse1HooksInterface(&hooks);
    library.impl("empty.memory_format", TORCH_FN(empty));
    library.impl("empty_strided", TORCH_FN(empty_strided));
    library.impl("_copy_from", TORCH_FN(copy_from));
    library.impl("_copy_from_and_resize", TORCH_FN(copy_and_resize));
    library.impl("as_strided", TORCH_FN(as_strided));
    library.impl("view", TORCH_FN(view));
    library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
}

}  // namespace
