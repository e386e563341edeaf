//! Where are compiled kernels kept?

use super::Shared;
use super::health::{device_error, scoped};
use super::kernels::{Access, Kernel};
use crate::Result;
use ::wgpu::{
    BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry, BindingType, BufferBindingType, ComputePipeline,
    ComputePipelineDescriptor, Device, PipelineCompilationOptions, PipelineLayoutDescriptor, ShaderModuleDescriptor,
    ShaderSource, ShaderStages,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A compiled kernel.
#[derive(Debug)]
pub(super) struct Pipeline {
    pub(super) pipeline: ComputePipeline,
    /// The layout of group 1.
    pub(super) buffers: BindGroupLayout,
}

/// The pipelines of a device, compiled at first use.
#[derive(Debug)]
pub(super) struct Pipelines {
    /// The layout of group 0: parameters and descriptors.
    pub(super) call: BindGroupLayout,
    compiled: Mutex<HashMap<(Kernel, u32), Arc<Pipeline>>>,
}

impl Pipelines {
    pub(super) fn new(device: &Device) -> Self {
        let entries = [
            entry(0, BufferBindingType::Uniform, true),
            entry(1, BufferBindingType::Storage { read_only: true }, false),
        ];
        let call = device
            .create_bind_group_layout(&BindGroupLayoutDescriptor { label: Some("kvtide call"), entries: &entries });
        Pipelines { call, compiled: Mutex::default() }
    }

    /// The pipeline of a kernel over an arena of `slabs` slabs.
    pub(super) fn get(&self, shared: &Shared, kernel: Kernel, slabs: usize) -> Result<Arc<Pipeline>> {
        let key = (kernel, kernel.slab_bindings(slabs));
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = compiled.get(&key) {
            return Ok(pipeline.clone());
        }
        let pipeline = scoped(&shared.device, || self.compile(&shared.device, kernel, key.1)).map_err(device_error)?;
        Ok(compiled.entry(key).or_insert(Arc::new(pipeline)).clone())
    }

    fn compile(&self, device: &Device, kernel: Kernel, slabs: u32) -> Pipeline {
        let spec = kernel.spec();
        let ty = |access| match access {
            Access::Channels => BufferBindingType::Uniform,
            access => BufferBindingType::Storage { read_only: access == Access::Read },
        };
        let own = (0..).zip(spec.buffers).map(|(binding, &access)| entry(binding, ty(access), false));
        let slab = spec.slabs.into_iter().flat_map(|uses| {
            let first = spec.first_slab();
            (first..first + slabs).map(move |binding| entry(binding, ty(uses.access()), false))
        });
        let entries: Vec<_> = own.chain(slab).collect();
        let label = Some(spec.name);
        let buffers = device.create_bind_group_layout(&BindGroupLayoutDescriptor { label, entries: &entries });
        let layout = device.create_pipeline_layout(&PipelineLayoutDescriptor {
            label,
            bind_group_layouts: &[Some(&self.call), Some(&buffers)],
            immediate_size: 0,
        });
        let source = ShaderSource::Wgsl(kernel.source(slabs).into());
        let module = device.create_shader_module(ShaderModuleDescriptor { label, source });
        let pipeline = device.create_compute_pipeline(&ComputePipelineDescriptor {
            label,
            layout: Some(&layout),
            module: &module,
            entry_point: Some(spec.entry),
            // Kernels write workgroup memory before they read it, and some drivers take seconds to compile the zeroing.
            compilation_options: PipelineCompilationOptions {
                constants: &kernel.constants(),
                zero_initialize_workgroup_memory: false,
            },
            cache: None,
        });
        Pipeline { pipeline, buffers }
    }
}

fn entry(binding: u32, ty: BufferBindingType, has_dynamic_offset: bool) -> BindGroupLayoutEntry {
    let ty = BindingType::Buffer { ty, has_dynamic_offset, min_binding_size: None };
    BindGroupLayoutEntry { binding, visibility: ShaderStages::COMPUTE, ty, count: None }
}
