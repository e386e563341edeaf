//! What is device memory in wgpu, and which part of it does an operation bind?

use super::health::{device_error, scoped};
use super::{NAME, Shared, WgpuBackend};
use crate::backend::ops::{Channels, View};
use crate::backend::params::ViewParams;
use crate::backend::{DeviceBuffer, DeviceId};
use crate::record::Record;
use crate::{Error, Result};
use ::wgpu::{BindingResource, Buffer, BufferBinding, BufferDescriptor, BufferSize, BufferUsages, Device};
use std::fmt;

/// What every buffer that kvtide works on must allow; one that holds a key calibration must allow
/// [`UNIFORM`](BufferUsages::UNIFORM) too.
pub const BUFFER_USAGES: BufferUsages =
    BufferUsages::STORAGE.union(BufferUsages::COPY_SRC).union(BufferUsages::COPY_DST);

/// Memory of the wgpu backend: a [`wgpu::Buffer`](::wgpu::Buffer).
///
/// A stream that has worked on it keeps it for a few submissions after the last handle is gone.
#[derive(Clone)]
pub struct WgpuBuffer {
    buffer: Buffer,
    device: DeviceId,
}

impl fmt::Debug for WgpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WgpuBuffer({} bytes)", self.bytes())
    }
}

impl DeviceBuffer for WgpuBuffer {
    fn bytes(&self) -> u64 {
        self.buffer.size()
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn same_memory(&self, other: &Self) -> bool {
        self.buffer == other.buffer
    }
}

impl WgpuBuffer {
    pub(super) fn new(buffer: Buffer, device: DeviceId) -> Self {
        WgpuBuffer { buffer, device }
    }

    /// The buffer itself, to use in the caller's own passes.
    pub fn raw(&self) -> &Buffer {
        &self.buffer
    }

    /// The whole buffer as a binding.
    pub(super) fn whole(&self, shared: &Shared) -> Result<Window<'_>> {
        Ok(self.window(0, self.bytes(), shared)?.0)
    }

    /// A binding that covers bytes `start..end`, and how many bytes it starts before `start`.
    pub(super) fn window(&self, start: u64, end: u64, shared: &Shared) -> Result<(Window<'_>, u64)> {
        let front = start % shared.align;
        let window = Window { buffer: self, offset: start - front, bytes: (end - start + front).next_multiple_of(4) };
        if window.bytes > shared.max_binding {
            return Err(shared.limit("max_storage_buffer_binding_size", window.bytes, shared.max_binding, "a binding"));
        }
        Ok((window, front))
    }
}

/// The part of a buffer that a dispatch binds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window<'a> {
    pub(super) buffer: &'a WgpuBuffer,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl<'a> Window<'a> {
    pub(super) fn resource(&self) -> BindingResource<'a> {
        let (buffer, offset, size) = (&self.buffer.buffer, self.offset, BufferSize::new(self.bytes));
        BindingResource::Buffer(BufferBinding { buffer, offset, size })
    }
}

/// A binding for `span` elements (at least one) from a view's start, and the view as kernels see it.
pub(super) fn view_window<'a>(
    view: &'a View<WgpuBuffer>,
    span: u64,
    shared: &Shared,
) -> Result<(Window<'a>, ViewParams)> {
    let size = view.dtype.bytes();
    let (window, front) = view.buffer.window(view.offset, view.offset + span * size, shared)?;
    // `front` is less than the binding alignment.
    Ok((window, view.params((front / size) as u32)))
}

/// A binding of exactly the channels of these pages, where they have any.
pub(super) fn channels_window<'a>(
    channels: Option<Channels<'a, WgpuBuffer>>,
    record: &Record,
    operation: &'static str,
    shared: &Shared,
) -> Result<Option<Window<'a>>> {
    let Some(Channels { buffer, offset }) = channels else { return Ok(None) };
    if !buffer.raw().usage().contains(BufferUsages::UNIFORM) {
        let format = "a key calibration in a buffer without UNIFORM".to_owned();
        return Err(Error::Unsupported { backend: NAME, operation, format });
    }
    let (bytes, most) =
        (Channels::<WgpuBuffer>::bytes(record.geometry()), shared.limits.max_uniform_buffer_binding_size);
    if bytes > most {
        return Err(shared.limit("max_uniform_buffer_binding_size", bytes, most, "the key calibration of int8 pages"));
    }
    Ok(Some(Window { buffer, offset, bytes }))
}

impl WgpuBackend {
    /// Takes a buffer that the caller created on this backend's device.
    ///
    /// wgpu cannot tell which device a buffer belongs to: one of another device is refused at its first use.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when it lacks one of [`BUFFER_USAGES`], [`Error::Misaligned`] when its size is not a
    /// multiple of 4.
    pub fn import(&self, buffer: Buffer) -> Result<WgpuBuffer> {
        let missing = BUFFER_USAGES - buffer.usage();
        if !missing.is_empty() {
            let format = format!("a buffer without {missing:?}");
            return Err(Error::Unsupported { backend: NAME, operation: "import", format });
        }
        if buffer.size() == 0 || !buffer.size().is_multiple_of(4) {
            return Err(Error::Misaligned { what: "the size of a buffer", value: buffer.size(), multiple: 4 });
        }
        Ok(WgpuBuffer::new(buffer, self.shared.caps.device))
    }
}

pub(super) fn alloc(shared: &Shared, label: &str, bytes: u64) -> Result<WgpuBuffer> {
    shared.health.check()?;
    let limits = &shared.limits;
    let maxima = [
        ("max_buffer_size", limits.max_buffer_size),
        ("max_storage_buffer_binding_size", limits.max_storage_buffer_binding_size),
    ];
    if let Some((limit, have)) = maxima.into_iter().find(|&(_, have)| bytes > have) {
        return Err(shared.limit(limit, bytes, have, "a buffer"));
    }
    // Any of them may hold a key calibration.
    let usage = BUFFER_USAGES | BufferUsages::UNIFORM;
    let buffer = create_buffer(&shared.device, label, bytes.max(4).next_multiple_of(4), usage)?;
    Ok(WgpuBuffer::new(buffer, shared.caps.device))
}

/// A buffer for any use, with the device's errors as ours.
pub(super) fn create_buffer(device: &Device, label: &str, size: u64, usage: BufferUsages) -> Result<Buffer> {
    let descriptor = BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: false };
    scoped(device, || device.create_buffer(&descriptor)).map_err(|error| match error {
        ::wgpu::Error::OutOfMemory { .. } => {
            Error::OutOfMemory { backend: NAME, bytes: size, purpose: label.to_owned() }
        }
        error => device_error(error),
    })
}
