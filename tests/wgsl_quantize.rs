//! Is 127 ÷ x in WGSL the same as in Rust, to the bit? Every mantissa and every exponent that a row's largest magnitude may
//! have, on every adapter; and with quotients as far off as WGSL allows, on the host.
#![cfg(feature = "wgpu")]

use kvtide::backend::wgpu::WgpuBackend;
use kvtide::quantize::SMALLEST;
use kvtide::{Backend, DeviceBuffer};
use wgpu::{BindGroupDescriptor, BindGroupEntry, ComputePipelineDescriptor, ShaderModuleDescriptor, ShaderSource};

/// Word i becomes the inverse of the magnitude with bits i.
const ENTRY: &str = "
@group(0) @binding(0) var<storage, read_write> words: array<u32>;
@compute @workgroup_size(64)
fn invert(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = (group.y * 65535u + group.x) * 64u + thread;
    if (at < arrayLength(&words)) {
        words[at] = bitcast<u32>(inverse_of(words[at]));
    }
}";

/// Every mantissa with one exponent, and mantissas of all kinds with every exponent.
fn magnitudes() -> Vec<u32> {
    let (smallest, largest) = (SMALLEST.to_bits(), f32::MAX.to_bits());
    let mut bits: Vec<u32> = (0..1 << 23).map(|mantissa| 127 << 23 | mantissa).collect();
    for exponent in smallest >> 23..=largest >> 23 {
        let random = (0..999u32).map(|i| i.wrapping_mul(2_654_435_761) >> 9);
        let edges = (0..23).flat_map(|bit| [1 << bit, (1 << bit) - 1, 0x7f_ffff - (1 << bit)]);
        // 127 is 0xfe0000 × 2⁻¹⁷: there the quotient passes a power of two.
        let around = 0x7d_fff0..=0x7e_0010;
        bits.extend(random.chain(edges).chain(around).map(|mantissa| exponent << 23 | mantissa));
    }
    bits.extend([smallest, largest]);
    bits
}

#[test]
fn every_adapter_divides_like_rust() {
    let bits = magnitudes();
    for adapter in &WgpuBackend::adapters() {
        let name = adapter.get_info().name;
        let backend = WgpuBackend::open_adapter(adapter).unwrap();
        let (device, mut stream) = (backend.device(), backend.stream().unwrap());
        let buffer = backend.alloc("magnitudes", bits.len() as u64 * 4).unwrap();
        backend.upload(&mut stream, &buffer, 0, bytemuck::cast_slice(&bits)).unwrap();
        backend.flush(&mut stream).unwrap();
        let text = [include_str!("../shaders/quantize.wgsl"), ENTRY].concat();
        let source = ShaderSource::Wgsl(text.into());
        let module = device.create_shader_module(ShaderModuleDescriptor { label: None, source });
        let pipeline = device.create_compute_pipeline(&ComputePipelineDescriptor {
            label: None,
            layout: None,
            module: &module,
            entry_point: Some("invert"),
            compilation_options: Default::default(),
            cache: None,
        });
        let entries = [BindGroupEntry { binding: 0, resource: buffer.raw().as_entire_binding() }];
        let layout = &pipeline.get_bind_group_layout(0);
        let group = device.create_bind_group(&BindGroupDescriptor { label: None, layout, entries: &entries });
        let mut encoder = device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            pass.set_pipeline(&pipeline);
            pass.set_bind_group(0, &group, &[]);
            let groups = (buffer.bytes() / 4).div_ceil(64) as u32;
            pass.dispatch_workgroups(65_535, groups.div_ceil(65_535), 1);
        }
        backend.queue().submit([encoder.finish()]);
        let mut out = vec![0u32; bits.len()];
        backend.download(&mut stream, &buffer, 0, bytemuck::cast_slice_mut(&mut out)).unwrap();
        for (&x, &got) in bits.iter().zip(&out) {
            let expected = (127.0 / f32::from_bits(x)).to_bits();
            assert_eq!(got, expected, "{name}: 127 / {:e}", f32::from_bits(x));
        }
        eprintln!("{name}: {} quotients", bits.len());
    }
}

/// `inverse_of` of `shaders/quantize.wgsl`, after a division that is `off` units off.
fn inverse_of(largest: u32, off: i32) -> u32 {
    let mantissa = (largest & 0x7f_ffff) | 0x80_0000;
    let shift = if mantissa > 0xfe_0000 { 24 } else { 23 };
    let ratio = 16_646_144.0 / mantissa as f32;
    let mut quotient = ((ratio * (1u32 << shift) as f32) as u32).wrapping_add_signed(off);
    let mut rest = 0u32.wrapping_sub(quotient.wrapping_mul(mantissa)) as i32;
    let whole = mantissa as i32;
    for _ in 0..4 {
        let step = i32::from(2 * rest > whole) - i32::from(2 * rest < -whole);
        quotient = quotient.wrapping_add_signed(step);
        rest -= step * whole;
    }
    ((282 - shift - (largest >> 23)) << 23) + quotient
}

#[test]
fn a_division_that_is_off_is_corrected() {
    for x in magnitudes().into_iter().step_by(7) {
        for off in -4..=4 {
            let expected = (127.0 / f32::from_bits(x)).to_bits();
            assert_eq!(inverse_of(x, off), expected, "127 / {:e}, off by {off}", f32::from_bits(x));
        }
    }
}
