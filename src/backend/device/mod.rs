//! The backend that is chosen at run time: one type for whichever device is there.

use super::cpu::CpuBackend;
use super::ops::{Arena, View};
use super::{Backend, DeviceBuffer, DeviceId, HostMemory};
use crate::{Error, Result};

#[cfg(feature = "cuda")]
use super::cuda::CudaBackend;
#[cfg(feature = "wgpu")]
use super::wgpu::WgpuBackend;

/// Declares the enums over the compiled-in backends and their plumbing.
macro_rules! devices {
    ($($(#[$cfg:meta])* $variant:ident($backend:ty),)*) => {
        /// Whichever backend was found when the program started; a [`Backend`] itself.
        ///
        /// Code that knows its backend uses the backend's own type and pays for no choice.
        #[derive(Debug, Clone)]
        #[non_exhaustive]
        pub enum Device { $($(#[$cfg])* #[allow(missing_docs, reason = "named after the backend")] $variant($backend),)* }

        /// Memory of a [`Device`].
        #[derive(Debug, Clone)]
        #[non_exhaustive]
        pub enum DeviceMemory {
            $($(#[$cfg])* #[allow(missing_docs, reason = "named after the backend")]
            $variant(<$backend as Backend>::Buffer),)*
        }

        /// A stream of a [`Device`].
        #[derive(Debug)]
        #[allow(clippy::large_enum_variant, reason = "a program has few streams")]
        #[non_exhaustive]
        pub enum DeviceStream {
            $($(#[$cfg])* #[allow(missing_docs, reason = "named after the backend")]
            $variant(<$backend as Backend>::Stream),)*
        }

        /// An event of a [`Device`].
        #[derive(Debug, Clone)]
        #[non_exhaustive]
        pub enum DeviceEvent {
            $($(#[$cfg])* #[allow(missing_docs, reason = "named after the backend")]
            $variant(<$backend as Backend>::Event),)*
        }

        /// Host memory of a [`Device`].
        #[derive(Debug, Clone)]
        #[non_exhaustive]
        pub enum DeviceHost {
            $($(#[$cfg])* #[allow(missing_docs, reason = "named after the backend")]
            $variant(<$backend as Backend>::Host),)*
        }

        impl HostMemory for DeviceHost {
            fn bytes(&self) -> u64 {
                match self { $($(#[$cfg])* DeviceHost::$variant(host) => HostMemory::bytes(host),)* }
            }
            fn device(&self) -> DeviceId {
                match self { $($(#[$cfg])* DeviceHost::$variant(host) => HostMemory::device(host),)* }
            }
            fn bytes_mut(&mut self) -> Option<&mut [u8]> {
                match self { $($(#[$cfg])* DeviceHost::$variant(host) => host.bytes_mut(),)* }
            }
        }

        impl DeviceBuffer for DeviceMemory {
            fn bytes(&self) -> u64 {
                match self { $($(#[$cfg])* DeviceMemory::$variant(buffer) => DeviceBuffer::bytes(buffer),)* }
            }
            fn device(&self) -> DeviceId {
                match self { $($(#[$cfg])* DeviceMemory::$variant(buffer) => DeviceBuffer::device(buffer),)* }
            }
            fn same_memory(&self, other: &Self) -> bool {
                match (self, other) {
                    $($(#[$cfg])* (DeviceMemory::$variant(a), DeviceMemory::$variant(b)) => a.same_memory(b),)*
                    #[allow(unreachable_patterns, reason = "the only variant when no backend feature is on")]
                    _ => false,
                }
            }
        }

        $(
            $(#[$cfg])*
            impl Chosen for $backend {
                fn take_buffer(memory: &DeviceMemory) -> Result<&Self::Buffer> {
                    match memory {
                        DeviceMemory::$variant(buffer) => Ok(buffer),
                        #[allow(unreachable_patterns, reason = "the only variant when no backend feature is on")]
                        _ => Err(Error::WrongDevice { what: "a buffer" }),
                    }
                }
                fn take_stream(stream: &mut DeviceStream) -> Result<&mut Self::Stream> {
                    match stream {
                        DeviceStream::$variant(stream) => Ok(stream),
                        #[allow(unreachable_patterns, reason = "the only variant when no backend feature is on")]
                        _ => Err(Error::WrongDevice { what: "a stream" }),
                    }
                }
                fn take_event(event: &DeviceEvent) -> Result<&Self::Event> {
                    match event {
                        DeviceEvent::$variant(event) => Ok(event),
                        #[allow(unreachable_patterns, reason = "the only variant when no backend feature is on")]
                        _ => Err(Error::WrongDevice { what: "an event" }),
                    }
                }
                fn take_host(host: &DeviceHost) -> Result<&Self::Host> {
                    match host {
                        DeviceHost::$variant(host) => Ok(host),
                        #[allow(unreachable_patterns, reason = "the only variant when no backend feature is on")]
                        _ => Err(Error::WrongDevice { what: "host memory" }),
                    }
                }
                fn wrap_host(host: Self::Host) -> DeviceHost { DeviceHost::$variant(host) }
                fn wrap_buffer(buffer: Self::Buffer) -> DeviceMemory { DeviceMemory::$variant(buffer) }
                fn wrap_stream(stream: Self::Stream) -> DeviceStream { DeviceStream::$variant(stream) }
                fn wrap_event(event: Self::Event) -> DeviceEvent { DeviceEvent::$variant(event) }
            }
            $(#[$cfg])*
            impl From<$backend> for Device {
                fn from(backend: $backend) -> Self { Device::$variant(backend) }
            }
        )*

        /// Runs an expression on the backend that the device is.
        macro_rules! on {
            ($device:expr, $name:ident => $body:expr) => {
                match $device { $($(#[$cfg])* Device::$variant($name) => $body,)* }
            };
        }
    };
}

/// A backend that [`Device`] can be: how to take its types out of the enums and put them in.
trait Chosen: Backend {
    fn take_buffer(memory: &DeviceMemory) -> Result<&Self::Buffer>;
    fn take_stream(stream: &mut DeviceStream) -> Result<&mut Self::Stream>;
    fn take_event(event: &DeviceEvent) -> Result<&Self::Event>;
    fn take_host(host: &DeviceHost) -> Result<&Self::Host>;
    fn wrap_host(host: Self::Host) -> DeviceHost;
    fn wrap_buffer(buffer: Self::Buffer) -> DeviceMemory;
    fn wrap_stream(stream: Self::Stream) -> DeviceStream;
    fn wrap_event(event: Self::Event) -> DeviceEvent;

    fn slabs(arena: Arena<'_, DeviceMemory>) -> Result<Vec<Self::Buffer>> {
        arena.slabs.iter().map(|slab| Self::take_buffer(slab).cloned()).collect()
    }

    fn view(view: &View<DeviceMemory>) -> Result<View<Self::Buffer>> {
        view.clone().try_map(|memory| Self::take_buffer(&memory).cloned())
    }
}

devices! {
    Cpu(CpuBackend),
    #[cfg(feature = "wgpu")]
    Wgpu(WgpuBackend),
    #[cfg(feature = "cuda")]
    Cuda(CudaBackend),
}

// After `devices!`, whose `on!` it uses.
mod forward;
mod operations;

impl Device {
    /// The best device present: a CUDA card, else a hardware adapter of wgpu, else the CPU.
    pub fn best() -> Result<Self> {
        #[cfg(feature = "cuda")]
        match CudaBackend::open(0) {
            Ok(backend) => return Ok(backend.into()),
            Err(error) => tracing::info!(%error, "no CUDA device"),
        }
        #[cfg(feature = "wgpu")]
        match WgpuBackend::open_hardware() {
            Ok(backend) => return Ok(backend.into()),
            Err(error) => tracing::info!(%error, "no hardware adapter for wgpu"),
        }
        Ok(CpuBackend::new().into())
    }

    /// The first device of a backend: `cpu`, `wgpu` or `cuda`; `auto` is [`best`](Self::best).
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the backend is unknown, not compiled in or not on this machine.
    pub fn open(backend: &str) -> Result<Self> {
        match backend {
            "auto" => Self::best(),
            "cpu" => Ok(CpuBackend::new().into()),
            #[cfg(feature = "wgpu")]
            "wgpu" => Ok(WgpuBackend::open()?.into()),
            #[cfg(feature = "cuda")]
            "cuda" => Ok(CudaBackend::open(0)?.into()),
            #[cfg(not(feature = "wgpu"))]
            "wgpu" => Err(Error::Unavailable { backend: "wgpu", reason: "built without the feature `wgpu`".into() }),
            #[cfg(not(feature = "cuda"))]
            "cuda" => Err(Error::Unavailable { backend: "cuda", reason: "built without the feature `cuda`".into() }),
            other => Err(Error::Unavailable { backend: "device", reason: format!("there is no backend `{other}`") }),
        }
    }

    /// Every device of every compiled-in backend, and why the others are missing.
    pub fn all() -> (Vec<Self>, Vec<Error>) {
        #[allow(unused_mut, reason = "extended by the backends that are compiled in")]
        let (mut devices, mut missing) = (vec![Device::from(CpuBackend::new())], Vec::new());
        #[cfg(feature = "wgpu")]
        for found in WgpuBackend::all() {
            match found {
                Ok(backend) => devices.push(backend.into()),
                Err(error) => missing.push(error),
            }
        }
        #[cfg(feature = "cuda")]
        for found in CudaBackend::all() {
            match found {
                Ok(backend) => devices.push(backend.into()),
                Err(error) => missing.push(error),
            }
        }
        #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
        missing.clear();
        (devices, missing)
    }
}
