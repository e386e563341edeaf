//! Do host and kernels agree on structs and numbers, and does a machine without a GPU get an error rather than a panic?
#![cfg(feature = "cuda")]

use half::{bf16, f16};
use kvtide::backend::cuda::CudaBackend;
use kvtide::backend::params::layouts;
use kvtide::{Dtype, Error, quantize};
use std::path::Path;
use std::process::Command;

#[test]
fn the_header_asserts_every_size_and_offset() {
    let header = include_str!("../kernels/params.cuh");
    let mut expected = Vec::new();
    for (name, bytes, fields) in layouts() {
        expected.push(format!("KV_SIZE({name}, {bytes});"));
        expected.extend(fields.iter().map(|(field, offset)| format!("KV_FIELD({name}, {field}, {offset});")));
    }
    let asserted: Vec<_> = header.lines().filter(|line| line.starts_with("KV_")).collect();
    assert_eq!(asserted, expected);
}

#[test]
fn opening_never_panics() {
    let opened = CudaBackend::open(0);
    let all = CudaBackend::all();
    match &opened {
        Ok(backend) => println!("opened {backend:?}: there is a driver, so its absence was not tested"),
        Err(Error::Unavailable { backend, reason }) => {
            assert_eq!(*backend, "cuda");
            println!("not available: {reason}");
            assert!(!cfg!(kvtide_no_kernels) || reason.contains("nvcc"), "{reason}");
            assert_eq!(all.len(), 1, "one error says why");
        }
        Err(other) => panic!("{other}"),
    }
    assert_eq!(all[0].is_ok(), opened.is_ok());
    assert!(matches!(CudaBackend::open(1 << 40), Err(Error::Unavailable { .. })));
}

/// A header of `kernels/`, with the functions that `code` adds, compiled for this machine; `None` without a C++ compiler.
fn compile(header: &str, code: &str) -> Option<libloading::Library> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, library) = (folder.join(format!("{header}.cpp")), folder.join(format!("lib{header}.so")));
    std::fs::write(&source, code).unwrap();
    let mut compiler = Command::new("g++");
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    compiler.args(["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-I"]);
    let Ok(output) = compiler.arg(kernels).arg("-o").arg(&library).arg(&source).output() else {
        println!("{header}.cuh: not run: there is no g++");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // SAFETY: the library holds the header's functions and runs nothing when it is loaded.
    Some(unsafe { libloading::Library::new(library) }.unwrap())
}

/// An element's bits in another type, as the CPU backend has them.
fn convert(bits: u32, from: Dtype, to: Dtype) -> u32 {
    if from == to {
        return bits;
    }
    let value = match from {
        Dtype::F32 => f32::from_bits(bits),
        Dtype::F16 => f16::from_bits(bits as u16).to_f32(),
        Dtype::Bf16 => bf16::from_bits(bits as u16).to_f32(),
    };
    match to {
        Dtype::F32 => value.to_bits(),
        Dtype::F16 => f16::from_f32(value).to_bits().into(),
        Dtype::Bf16 => bf16::from_f32(value).to_bits().into(),
    }
}

#[test]
fn conversions_are_those_of_the_cpu_to_the_bit() {
    let code = r#"
        #include "numeric.cuh"
        extern "C" u32 kv_convert(u32 bits, u32 from, u32 to) { return convert(bits, from, to); }
        extern "C" bool kv_non_finite(u32 bits, u32 dtype) { return non_finite(bits, dtype); }
    "#;
    let Some(library) = compile("numeric", code) else { return };
    // SAFETY: the functions have these types.
    let (ours, non_finite) = unsafe {
        let convert = library.get::<extern "C" fn(u32, u32, u32) -> u32>(b"kv_convert").unwrap();
        (convert, library.get::<extern "C" fn(u32, u32) -> bool>(b"kv_non_finite").unwrap())
    };
    // Every 16-bit number; for f32 every upper half with lower halves around each place where rounding can turn.
    let around = |bit: u32| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1];
    let low: Vec<u32> = (0..16).flat_map(around).chain([0xffff, 0x3000, 0x2fff, 0x1fff, 0xcccc]).collect();
    for from in Dtype::ALL {
        for high in 0..=0xffff_u32 {
            let lows = if from == Dtype::F32 { &low[..] } else { &low[..1] };
            for bits in lows.iter().map(|low| if from == Dtype::F32 { high << 16 | low } else { high }) {
                for to in Dtype::ALL {
                    let got = ours(bits, from.code(), to.code());
                    assert_eq!(got, convert(bits, from, to), "{bits:#x} from {} to {}", from.name(), to.name());
                }
                let value = f32::from_bits(convert(bits, from, Dtype::F32));
                assert_eq!(non_finite(bits, from.code()), !value.is_finite(), "{bits:#x} of {}", from.name());
            }
        }
    }
}

/// The intrinsics that `kernels/quantize.cuh` uses, as this machine has them, and rows as the kernel takes them.
const QUANTIZE: &str = r#"
    #include <cmath>
    #include <cstdint>
    #include <cstring>
    #define __device__
    #define __forceinline__ inline
    static uint32_t __float_as_uint(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
    static float __uint_as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
    static float __fsub_rn(float a, float b) { return a - b; }
    static float __fmul_rn(float a, float b) { return a * b; }
    static float __fdiv_rn(float a, float b) { return a / b; }
    static int __float2int_rn(float x) { return int(std::nearbyint(x)); }
    #include "quantize.cuh"
    extern "C" float kv_row(const float* x, u32 dim, int8_t* codes) {
        u32 largest = 0;
        for (u32 i = 0; i < dim; ++i)
            if (magnitude(x[i]) < INFINITE && magnitude(x[i]) > largest) largest = magnitude(x[i]);
        const RowScale row = row_scale(largest);
        for (u32 i = 0; i < dim; ++i) codes[i] = int8_t(code(x[i], row.inverse));
        return row.scale;
    }
    extern "C" float kv_calibrate(float x, float mean, float inverse) { return calibrate(x, mean, inverse); }
"#;

/// Rows of 24 numbers: of every size, with every kind of number in them, and with ties.
fn rows() -> Vec<Vec<f32>> {
    let mut state = 1u64;
    let mut word = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    let special = [0.0, -0.0, 1.0, quantize::SMALLEST, f32::MAX, f32::MIN, f32::INFINITY, -f32::INFINITY, f32::NAN];
    let mut rows = Vec::new();
    for exponent in 0..255 {
        let top = f32::from_bits(exponent << 23 | word() >> 9);
        let unit = |word: u32| word as i32 as f32 / 2f32.powi(31);
        rows.push((0..24).map(|_| top * unit(word())).collect());
        rows.push((0..24).map(|at| if at == 7 { -top } else { top * (at as f32 + 0.5) / 127.0 }).collect());
        rows.push(vec![top; 24]);
        let odd =
            |word: u32| if word.is_multiple_of(5) { special[(word / 5) as usize % special.len()] } else { unit(word) };
        rows.push((0..24).map(|_| odd(word())).collect());
    }
    rows.extend((0..4000).map(|_| (0..24).map(|_| f32::from_bits(word())).collect()));
    for near in [f32::from_bits(0x03ff_ffff), quantize::SMALLEST, f32::from_bits(0x0400_0001)] {
        rows.push((0..24).map(|at| if at % 2 == 0 { near } else { -near / at as f32 }).collect());
    }
    rows.push((0..24).map(|at| [f32::INFINITY, f32::NAN, -f32::INFINITY, 0.0][at % 4]).collect());
    rows
}

#[test]
fn rows_are_quantised_as_on_the_cpu_to_the_bit() {
    let Some(library) = compile("quantize", QUANTIZE) else { return };
    // SAFETY: the functions have these types, and `kv_row` stays within `dim` numbers and codes.
    let (row, calibrate) = unsafe {
        let row = library.get::<extern "C" fn(*const f32, u32, *mut i8) -> f32>(b"kv_row").unwrap();
        (row, library.get::<extern "C" fn(f32, f32, f32) -> f32>(b"kv_calibrate").unwrap())
    };
    for values in rows() {
        let (mut got, mut want) = (vec![99i8; values.len()], vec![99i8; values.len()]);
        let scale = row(values.as_ptr(), values.len() as u32, got.as_mut_ptr());
        assert_eq!(scale.to_bits(), quantize::row(&values, &mut want).to_bits(), "{values:?}");
        assert_eq!(got, want, "{values:?}");
        for (&x, (mean, inverse)) in values.iter().zip([(0.0, 1.0), (0.3, 1.0 / 0.7), (-1e30, 1e30)].iter().cycle()) {
            let want = if x.is_finite() { (x - mean) * inverse } else { x };
            assert_eq!(calibrate(x, *mean, *inverse).to_bits(), want.to_bits(), "{x:e} by {mean:e} and {inverse:e}");
        }
    }
}
