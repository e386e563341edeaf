//! Do the backends of this crate keep the contracts? The conformance suite on every device of this machine.
#![cfg(feature = "conformance")]

use kvtide::Device;
use kvtide::backend::cpu::CpuBackend;
use kvtide::conformance_tests;

conformance_tests!(cpu, CpuBackend, vec![Ok(CpuBackend::new())]);
conformance_tests!(device, Device, vec![Ok(CpuBackend::new().into())]);

#[cfg(feature = "wgpu")]
conformance_tests!(wgpu, kvtide::backend::wgpu::WgpuBackend, kvtide::backend::wgpu::WgpuBackend::all());

#[cfg(feature = "cuda")]
conformance_tests!(cuda, kvtide::backend::cuda::CudaBackend, kvtide::backend::cuda::CudaBackend::all());
