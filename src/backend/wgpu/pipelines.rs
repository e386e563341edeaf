//! Where are compiled kernels kept?

use super::health::{device_error, scoped};
use super::kernels::{Access, Kernel};
use crate::Result;
use ::wgpu::{
    BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry, BindingType, BufferBindingType, ComputePipeline,
    ComputePipelineDescriptor, Device, PipelineCache, PipelineCompilationOptions, PipelineLayoutDescriptor,
    ShaderModuleDescriptor, ShaderSource, ShaderStages,
};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A compiled kernel.
#[derive(Debug)]
pub(super) struct Pipeline {
    pub(super) pipeline: ComputePipeline,
    /// The layout of group 1.
    pub(super) buffers: BindGroupLayout,
}

/// A pipeline for each kernel and number of slab bindings, or a place for it.
type Places = HashMap<(Kernel, u32), Arc<Mutex<Option<Arc<Pipeline>>>>>;

/// The pipelines of a device, compiled at first use or ahead of it.
#[derive(Debug)]
pub(super) struct Pipelines {
    /// The layout of group 0: parameters and descriptors.
    pub(super) call: BindGroupLayout,
    /// Each place is locked while it is compiled.
    places: Mutex<Places>,
    /// Those that a call has waited for.
    late: AtomicUsize,
    /// What the driver keeps of kernels, where it lets others keep it.
    pub(super) cache: Option<PipelineCache>,
}

impl Pipelines {
    pub(super) fn new(device: &Device) -> Self {
        let entries = [
            entry(0, BufferBindingType::Uniform, true),
            entry(1, BufferBindingType::Storage { read_only: true }, false),
        ];
        let call = device
            .create_bind_group_layout(&BindGroupLayoutDescriptor { label: Some("kvtide call"), entries: &entries });
        Pipelines { call, places: Mutex::default(), late: AtomicUsize::new(0), cache: None }
    }

    /// The pipeline of a kernel over an arena of `slabs` slabs, for a call that waits for it.
    pub(super) fn get(&self, device: &Device, kernel: Kernel, slabs: usize) -> Result<Arc<Pipeline>> {
        let (pipeline, new) = self.find(device, kernel, slabs)?;
        if new {
            self.late.fetch_add(1, Ordering::Relaxed);
        }
        Ok(pipeline)
    }

    /// The same for nobody yet, and whether it was missing.
    pub(super) fn find(&self, device: &Device, kernel: Kernel, slabs: usize) -> Result<(Arc<Pipeline>, bool)> {
        let bindings = kernel.slab_bindings(slabs);
        let place = self.places().entry((kernel, bindings)).or_default().clone();
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = &*place {
            return Ok((pipeline.clone(), false));
        }
        let pipeline = Arc::new(scoped(device, || self.compile(device, kernel, bindings)).map_err(device_error)?);
        *place = Some(pipeline.clone());
        Ok((pipeline, true))
    }

    /// Makes a place for a pipeline; whether there was none.
    pub(super) fn claim(&self, kernel: Kernel, slabs: usize) -> bool {
        match self.places().entry((kernel, kernel.slab_bindings(slabs))) {
            Entry::Occupied(_) => false,
            Entry::Vacant(place) => {
                place.insert(Arc::default());
                true
            }
        }
    }

    /// How many pipelines there are, and how many of them a call has waited for.
    pub(super) fn counts(&self) -> [usize; 2] {
        let there = |place: &Arc<Mutex<Option<_>>>| place.try_lock().is_ok_and(|place| place.is_some());
        [self.places().values().filter(|place| there(place)).count(), self.late.load(Ordering::Relaxed)]
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
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
            cache: self.cache.as_ref(),
        });
        Pipeline { pipeline, buffers }
    }
}

fn entry(binding: u32, ty: BufferBindingType, has_dynamic_offset: bool) -> BindGroupLayoutEntry {
    let ty = BindingType::Buffer { ty, has_dynamic_offset, min_binding_size: None };
    BindGroupLayoutEntry { binding, visibility: ShaderStages::COMPUTE, ty, count: None }
}
