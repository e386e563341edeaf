//! Do host and kernels agree on structs and numbers, and does a machine without a GPU get an error rather than a panic?
#![cfg(feature = "cuda")]

use half::{bf16, f16};
use kvtide::backend::cuda::CudaBackend;
use kvtide::backend::params::layouts;
use kvtide::{Dtype, Error};
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

/// `kernels/numeric.cuh` compiled for this machine.
struct Numeric(libloading::Library);

impl Numeric {
    /// `None` without a C++ compiler.
    fn compile() -> Option<Self> {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (source, library) = (folder.join("numeric.cpp"), folder.join("libnumeric.so"));
        let code = r#"
            #include "numeric.cuh"
            extern "C" u32 kv_convert(u32 bits, u32 from, u32 to) { return convert(bits, from, to); }
            extern "C" bool kv_non_finite(u32 bits, u32 dtype) { return non_finite(bits, dtype); }
        "#;
        std::fs::write(&source, code).unwrap();
        let mut compiler = Command::new("g++");
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        compiler.args(["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-I"]).arg(kernels);
        let output = compiler.arg("-o").arg(&library).arg(&source).output();
        let Ok(output) = output else {
            println!("numeric.cuh: not run: there is no g++");
            return None;
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: the library holds the two functions above and runs nothing when it is loaded.
        Some(Numeric(unsafe { libloading::Library::new(library) }.unwrap()))
    }
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
    let Some(Numeric(library)) = Numeric::compile() else { return };
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
