//! Which adapters are there, and what can they do?

use super::ahead::Ahead;
use super::clock;
use super::health::{Health, device_error, scoped};
use super::kernels::{MAX_SLABS, OTHER_BUFFERS, UNIFORM_BUFFERS};
use super::memory::{BUFFER_USAGES, create_buffer};
use super::pipelines::Pipelines;
use super::shapes::{Processor, WORKGROUP_BYTES};
use super::{NAME, Shared, WgpuBackend, WgpuBuffer};
use crate::backend::{Caps, DeviceId, Operation};
use crate::{Error, Result};
use ::wgpu::{
    Adapter, Backends, Device, DeviceDescriptor, DeviceType, DownlevelFlags, Features, Instance, InstanceDescriptor,
    Limits, PipelineCacheDescriptor, Queue,
};
use std::sync::Arc;

/// [`Caps::at_once`], for want of the number of processors.
const AT_ONCE: u64 = 512;

/// Query vectors of a work item of `attend`: the lanes of a `vec4`.
pub(super) const QUERY_TILE: u32 = 4;
/// Largest slab: every API counts this far, in bytes.
const LARGEST_SLAB: u64 = (1 << 31) - 256;

/// A limit that the kernels count on.
struct Need {
    name: &'static str,
    have: fn(&Limits) -> u64,
    need: u64,
    purpose: &'static str,
}

macro_rules! needs {
    ($($name:ident $need:expr, $purpose:literal;)*) => {
        &[$(Need {
            name: stringify!($name),
            have: |limits| limits.$name.into(),
            need: $need as u64,
            purpose: $purpose,
        },)*]
    };
}

const NEEDS: &[Need] = needs! {
    max_compute_workgroup_storage_size WORKGROUP_BYTES, "attend";
    max_compute_invocations_per_workgroup 128, "attend";
    max_compute_workgroup_size_x 128, "attend";
    max_compute_workgroups_per_dimension 65_535, "large grids";
    max_storage_buffers_per_shader_stage OTHER_BUFFERS + 2, "copies from one slab to another";
    max_buffers_and_acceleration_structures_per_shader_stage OTHER_BUFFERS + UNIFORM_BUFFERS + 2,
        "copies from one slab to another";
    max_uniform_buffers_per_shader_stage UNIFORM_BUFFERS, "int8 pages";
    max_dynamic_uniform_buffers_per_pipeline_layout 1, "every kernel";
    max_uniform_buffer_binding_size 256, "every kernel";
    max_bind_groups 2, "every kernel";
    max_bindings_per_bind_group 8, "append and attend";
};

impl WgpuBackend {
    /// Every adapter that can compute, hardware first.
    pub fn adapters() -> Vec<Adapter> {
        let instance = Instance::new(InstanceDescriptor::new_without_display_handle_from_env());
        let mut adapters = pollster::block_on(instance.enumerate_adapters(Backends::all()));
        let needed = DownlevelFlags::COMPUTE_SHADERS | DownlevelFlags::SHADER_F16_IN_F32;
        adapters.retain(|adapter| adapter.get_downlevel_capabilities().flags.contains(needed));
        adapters.sort_by_key(|adapter| match adapter.get_info().device_type {
            DeviceType::DiscreteGpu => 0,
            DeviceType::IntegratedGpu => 1,
            DeviceType::VirtualGpu => 2,
            DeviceType::Other => 3,
            DeviceType::Cpu => 4,
        });
        adapters
    }

    /// Every adapter as a device of its own, hardware first, or why it cannot be used.
    pub fn all() -> Vec<Result<Self>> {
        let adapters = Self::adapters();
        if adapters.is_empty() {
            return vec![Err(unavailable("no adapter that can compute was found"))];
        }
        adapters.iter().map(Self::open_adapter).collect()
    }

    /// The best adapter that works, of any kind.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when there is none, or what the best one fails with.
    pub fn open() -> Result<Self> {
        Self::first(|_| true)
    }

    /// The best adapter that works and is not a software one.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when there is none, or what the best one fails with.
    pub fn open_hardware() -> Result<Self> {
        Self::first(|adapter| adapter.get_info().device_type != DeviceType::Cpu)
    }

    fn first(wanted: impl Fn(&Adapter) -> bool) -> Result<Self> {
        let mut failed = None;
        for adapter in Self::adapters().iter().filter(|adapter| wanted(adapter)) {
            match Self::open_adapter(adapter) {
                Ok(backend) => return Ok(backend),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        Err(failed.unwrap_or_else(|| unavailable("no such adapter was found")))
    }

    /// Opens an adapter with as much memory, as many slabs and as long key calibrations as it offers, and WebGPU's default
    /// limits otherwise.
    pub fn open_adapter(adapter: &Adapter) -> Result<Self> {
        let offered = adapter.limits();
        // Where an adapter has less than the default, its own value: the check below says whether that matters.
        let mut limits = Limits::default().or_worse_values_from(&offered);
        limits.max_buffer_size = offered.max_buffer_size;
        limits.max_storage_buffer_binding_size = offered.max_storage_buffer_binding_size;
        limits.max_uniform_buffer_binding_size = offered.max_uniform_buffer_binding_size;
        limits.max_storage_buffers_per_shader_stage = offered.max_storage_buffers_per_shader_stage;
        limits.max_buffers_and_acceleration_structures_per_shader_stage =
            offered.max_buffers_and_acceleration_structures_per_shader_stage;
        Self::open_with_limits(adapter, limits)
    }

    /// Opens an adapter with exactly these limits.
    ///
    /// # Errors
    /// [`Error::Limit`] when they are too small for the kernels, [`Error::Unavailable`] when the adapter refuses them.
    pub fn open_with_limits(adapter: &Adapter, limits: Limits) -> Result<Self> {
        check(&adapter.get_info().name, &limits)?;
        let descriptor = DeviceDescriptor {
            label: Some("kvtide"),
            required_features: adapter.features()
                & (clock::FEATURES
                    | Features::MAPPABLE_PRIMARY_BUFFERS
                    | Features::SUBGROUP
                    | Features::PIPELINE_CACHE),
            required_limits: limits,
            ..Default::default()
        };
        let opened = pollster::block_on(adapter.request_device(&descriptor));
        let (device, queue) = opened.map_err(|error| unavailable(&error.to_string()))?;
        let health = Health::default();
        health.watch(&device);
        Self::new(device, queue, health)
    }

    /// Works on a device that the caller made, with the caller's queue.
    ///
    /// The device's callbacks, for its loss and for errors that no scope catches, stay the caller's.
    ///
    /// # Errors
    /// [`Error::Limit`] when its limits are too small for the kernels.
    pub fn from_device(device: Device, queue: Queue) -> Result<Self> {
        check(&device.adapter_info().name, &device.limits())?;
        Self::new(device, queue, Health::default())
    }

    /// Compiles from what [`pipeline_cache`](Self::pipeline_cache) gave before, where the device has
    /// [`PIPELINE_CACHE`](Features::PIPELINE_CACHE) (Vulkan, and one that this type opened), and keeps what is compiled from now
    /// on; elsewhere, and with data of another driver, it compiles as ever. Most drivers of desktops keep caches of their own.
    ///
    /// # Panics
    /// When the device is in use already.
    ///
    /// # Safety
    /// The data must be what `pipeline_cache` gave, unchanged: drivers trust it. A file should be named by
    /// [`pipeline_cache_key`](::wgpu::util::pipeline_cache_key).
    #[must_use]
    pub unsafe fn with_pipeline_cache(mut self, data: Option<&[u8]>) -> Self {
        let shared = self.unused();
        if shared.device.features().contains(Features::PIPELINE_CACHE) {
            let descriptor = PipelineCacheDescriptor { label: Some("kvtide"), data, fallback: true };
            // SAFETY: the caller says where the data is from.
            let cache = scoped(&shared.device, || unsafe { shared.device.create_pipeline_cache(&descriptor) });
            let pipelines = Arc::get_mut(&mut shared.pipelines).expect("nothing compiles yet");
            pipelines.cache = cache.inspect_err(|error| tracing::debug!(%error, "no pipeline cache")).ok();
        }
        self
    }

    /// What the driver keeps of the kernels that were compiled, to write to a file for the next process; `None` without a
    /// [cache](Self::with_pipeline_cache).
    pub fn pipeline_cache(&self) -> Option<Vec<u8>> {
        self.shared.pipelines.cache.as_ref()?.get_data()
    }

    /// How many kernels are compiled, and how many of them a call has waited for, for tests.
    #[doc(hidden)]
    pub fn compiled(&self) -> [usize; 2] {
        self.shared.pipelines.counts()
    }

    /// Compiles kernels of their own for common dims on a software adapter too, for tests of these kernels.
    ///
    /// # Panics
    /// When the device is in use already.
    #[doc(hidden)]
    pub fn with_own_kernels(mut self) -> Self {
        self.unused().processor.own_kernels = true;
        self
    }

    /// Uses no subgroups where the adapter has them, for benches of the kernels without.
    ///
    /// # Panics
    /// When the device is in use already.
    #[doc(hidden)]
    pub fn without_subgroups(mut self) -> Self {
        self.unused().processor.subgroup = 0;
        self
    }

    /// Allows slabs of so many bytes at most, for benches of arenas of many.
    ///
    /// # Panics
    /// When the device is in use already.
    #[doc(hidden)]
    pub fn with_slab_bytes(mut self, bytes: u64) -> Self {
        let caps = &mut self.unused().caps;
        caps.max_slab_bytes = caps.max_slab_bytes.min(bytes);
        self
    }

    fn unused(&mut self) -> &mut Shared {
        Arc::get_mut(&mut self.shared).expect("nothing uses a device that has just been opened")
    }

    /// The device, for the caller's own work.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The queue that all work goes to.
    pub fn queue(&self) -> &Queue {
        &self.shared.queue
    }

    fn new(device: Device, queue: Queue, health: Health) -> Result<Self> {
        let (limits, info) = (device.limits(), device.adapter_info());
        let caps = caps(&limits, format!("{} ({})", info.name, info.backend));
        let pipelines = Arc::new(Pipelines::new(&device));
        let spare = WgpuBuffer::new(create_buffer(&device, "kvtide spare", 16, BUFFER_USAGES)?, caps.device);
        let max_binding = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        let align = limits.min_storage_buffer_offset_alignment.max(limits.min_uniform_buffer_offset_alignment).into();
        if align > 256 {
            return Err(device_error(format!("buffer offsets must be multiples of {align}, more than 256")));
        }
        let processor = Processor {
            subgroup: if device.features().contains(Features::SUBGROUP) { info.subgroup_min_size } else { 0 },
            own_kernels: info.device_type != DeviceType::Cpu,
        };
        let shared = Shared {
            device,
            queue,
            health,
            limits,
            caps,
            pipelines,
            ahead: Ahead::default(),
            spare,
            max_binding,
            align,
            processor,
        };
        Ok(WgpuBackend { shared: Arc::new(shared) })
    }
}

fn unavailable(reason: &str) -> Error {
    Error::Unavailable { backend: NAME, reason: reason.to_owned() }
}

/// Compares limits with what the kernels count on.
fn check(adapter: &str, limits: &Limits) -> Result<()> {
    for Need { name, have, need, purpose } in NEEDS {
        let have = have(limits);
        if have < *need {
            return Err(Error::Limit { adapter: adapter.to_owned(), limit: name, need: *need, have, purpose });
        }
    }
    Ok(())
}

fn caps(limits: &Limits, adapter: String) -> Caps {
    let storage = limits.max_storage_buffers_per_shader_stage - OTHER_BUFFERS;
    let total = limits.max_buffers_and_acceleration_structures_per_shader_stage - OTHER_BUFFERS - UNIFORM_BUFFERS;
    let bindings = limits.max_bindings_per_bind_group - OTHER_BUFFERS;
    let slabs = storage.min(total).min(bindings).min(MAX_SLABS);
    let largest = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min(LARGEST_SLAB);
    let mut shown: Vec<_> = NEEDS.iter().map(|need| (need.name, (need.have)(limits))).collect();
    shown.push(("max_buffer_size", limits.max_buffer_size));
    shown.push(("max_storage_buffer_binding_size", limits.max_storage_buffer_binding_size));
    Caps {
        backend: NAME,
        adapter,
        device: DeviceId::unique(),
        // The largest power of two: kernels are compiled for those.
        max_slabs: 1 << slabs.ilog2(),
        max_slab_bytes: largest,
        max_channels: ("max_uniform_buffer_binding_size", limits.max_uniform_buffer_binding_size),
        memory_bytes: None,
        query_tile: QUERY_TILE,
        at_once: AT_ONCE,
        prefill: |_, _| None,
        overlap: false,
        formats: Operation::formats,
        limits: shown,
    }
}
