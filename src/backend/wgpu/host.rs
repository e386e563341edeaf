//! How do bytes get from the host to the device, within it, and back?

use super::WgpuBuffer;
use super::dispatch::{Dispatch, FOLD};
use super::health::{device_error, scoped};
use super::kernels::Kernel;
use super::memory::create_buffer;
use super::stream::{RING_BYTES, WgpuStream};
use crate::Result;
use crate::backend::ops::{check_sum, copy_sides, range};
use ::wgpu::{BufferUsages, MapMode};
use bytemuck::{Pod, Zeroable};
use std::sync::{Arc, OnceLock};

/// Uploads up to this size travel with the batch; larger ones go to the queue at once.
const INLINE_BYTES: usize = RING_BYTES as usize / 4;
/// Most bytes that the queue or a download holds a copy of at a time.
const CHUNK_BYTES: usize = 16 << 20;

/// Parameters of `shaders/fill.wgsl`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct FillParams {
    first: u32,
    words: u32,
    word: u32,
    reserved: u32,
}

/// Parameters of `shaders/sum.wgsl`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct SumParams {
    units: u32,
    reserved: [u32; 3],
}

/// Bytes that a workgroup of `shaders/sum.wgsl` reads.
const SUM_BYTES: u64 = 256 * 4 * 16;

pub(super) fn upload(stream: &mut WgpuStream, dst: &WgpuBuffer, offset: u64, data: &[u8]) -> Result<()> {
    range(dst, offset, data.len() as u64, "an upload", &stream.shared.caps)?;
    if data.is_empty() {
        return Ok(());
    }
    if data.len() <= INLINE_BYTES {
        return stream.copy_from_host(dst, offset, data);
    }
    for (at, chunk) in (offset..).step_by(CHUNK_BYTES).zip(data.chunks(CHUNK_BYTES)) {
        stream.flush()?;
        let shared = &stream.shared;
        let written = scoped(&shared.device, || shared.queue.write_buffer(dst.raw(), at, chunk));
        written.map_err(|error| shared.health.fail(error))?;
        stream.written = true;
    }
    Ok(())
}

pub(super) fn download(stream: &mut WgpuStream, src: &WgpuBuffer, offset: u64, out: &mut [u8]) -> Result<()> {
    range(src, offset, out.len() as u64, "a download", &stream.shared.caps)?;
    for (at, chunk) in (offset..).step_by(CHUNK_BYTES).zip(out.chunks_mut(CHUNK_BYTES)) {
        read(stream, src, at, chunk)?;
    }
    Ok(())
}

/// Copies one chunk into the stream's mappable buffer, waits for it and reads it.
fn read(stream: &mut WgpuStream, src: &WgpuBuffer, offset: u64, out: &mut [u8]) -> Result<()> {
    let bytes = out.len() as u64;
    let shared = stream.shared.clone();
    let landing = match stream.landing.take().filter(|buffer| buffer.size() >= bytes) {
        Some(buffer) => buffer,
        None => {
            let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
            create_buffer(&shared.device, "kvtide download", bytes.next_power_of_two(), usage)?
        }
    };
    stream.encoder().copy_buffer_to_buffer(src.raw(), offset, &landing, 0, bytes);
    stream.flush()?;
    let mapped = Arc::new(OnceLock::new());
    let report = mapped.clone();
    let map = || {
        landing.map_async(MapMode::Read, 0..bytes, move |result| {
            let _ = report.set(result);
        });
    };
    scoped(&shared.device, map).map_err(|error| shared.health.fail(error))?;
    let Some(last) = &stream.last else { return Err(device_error("a download was not submitted")) };
    shared.health.wait(&shared.device, last, || mapped.get().is_some())?;
    if let Some(Err(error)) = mapped.get() {
        return Err(shared.health.fail(error));
    }
    out.copy_from_slice(&landing.get_mapped_range(0..bytes).map_err(device_error)?);
    landing.unmap();
    stream.landing = Some(landing);
    Ok(())
}

pub(super) fn copy(
    stream: &mut WgpuStream,
    src: (&WgpuBuffer, u64),
    dst: (&WgpuBuffer, u64),
    bytes: u64,
) -> Result<()> {
    let caps = &stream.shared.caps;
    copy_sides(src, dst, bytes, caps)?;
    if bytes > 0 {
        stream.encoder().copy_buffer_to_buffer(src.0.raw(), src.1, dst.0.raw(), dst.1, bytes);
    }
    Ok(())
}

pub(super) fn fill(stream: &mut WgpuStream, dst: &WgpuBuffer, offset: u64, bytes: u64, word: u32) -> Result<()> {
    range(dst, offset, bytes, "a fill", &stream.shared.caps)?;
    if bytes == 0 {
        return Ok(());
    }
    if word == 0 {
        stream.encoder().clear_buffer(dst.raw(), offset, Some(bytes));
        return Ok(());
    }
    let shared = stream.shared.clone();
    let (window, front) = dst.window(offset, offset + bytes, &shared)?;
    let words = (bytes / 4) as u32;
    let dispatch = Dispatch {
        kernel: Kernel::Fill,
        buffers: &[window],
        slabs: &[],
        grid: [u64::from(words).div_ceil(128).min(FOLD), 1, 1],
    };
    stream.dispatch(&dispatch, [], |[]| FillParams { first: (front / 4) as u32, words, word, reserved: 0 })
}

pub(super) fn sum(stream: &mut WgpuStream, src: &WgpuBuffer, bytes: u64, total: &WgpuBuffer) -> Result<()> {
    check_sum(src, bytes, total, &stream.shared.caps)?;
    if bytes == 0 {
        return Ok(());
    }
    let shared = stream.shared.clone();
    let (source, _) = src.window(0, bytes, &shared)?;
    let (target, _) = total.window(0, 4, &shared)?;
    // They take more than one block each where there are more.
    let grid = [bytes.div_ceil(SUM_BYTES).min(FOLD), 1, 1];
    let dispatch = Dispatch { kernel: Kernel::Sum, buffers: &[source, target], slabs: &[], grid };
    stream.dispatch(&dispatch, [], |[]| SumParams { units: (bytes / 16) as u32, reserved: [0; 3] })
}
