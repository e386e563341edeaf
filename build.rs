//! Compiles the CUDA kernels into fatbins when the `cuda` feature is on and there is an nvcc.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `NVCC` | the nvcc to use; else the one of `CUDA_HOME`, `CUDA_PATH`, /usr/local/cuda, `PATH`, or .cuda/cu13 here |
//! | `KVTIDE_CUDA_ARCHS` | architectures to compile for, such as `90` or `80,90`; PTX of the newest comes on top; `none`: no kernels |
//! | `KVTIDE_REQUIRE_NVCC` | `1`: fail without nvcc, instead of building a crate whose CUDA backend does not open |

use anyhow::{Context, Result, bail, ensure};
use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

const KERNELS: [&str; 10] = [
    "append",
    "transfer",
    "attend",
    "attend_mma",
    "attend_mma_int8",
    "attend_prefill",
    "merge",
    "project",
    "score",
    "sum",
];
const HEADERS: [&str; 22] = [
    "params",
    "append",
    "project",
    "descriptors",
    "divide",
    "record",
    "projections",
    "numeric",
    "quantize",
    "chunk",
    "scales",
    "tiles",
    "columns",
    "ring",
    "states",
    "weights",
    "vectors",
    "warp",
    "digits",
    "fold",
    "mma",
    "ptx",
];
const ARCHS: &str = "80,86,89,90,100,120";

fn main() -> Result<()> {
    println!("cargo::rustc-check-cfg=cfg(kvtide_no_kernels)");
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    for name in KERNELS {
        println!("cargo::rerun-if-changed=kernels/{name}.cu");
    }
    for name in HEADERS {
        println!("cargo::rerun-if-changed=kernels/{name}.cuh");
    }
    let variables = ["PATH", "NVCC", "CUDA_HOME", "CUDA_PATH", "KVTIDE_CUDA_ARCHS", "KVTIDE_REQUIRE_NVCC", "DOCS_RS"];
    for variable in variables {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?);
    let unasked =
        env::var_os("DOCS_RS").is_some() || env::var_os("KVTIDE_CUDA_ARCHS").is_some_and(|archs| archs == "none");
    let nvcc = if unasked { None } else { find_nvcc()? };
    let code = match &nvcc {
        Some(nvcc) => compile(nvcc, &out)?,
        None => without_kernels(&out, unasked)?,
    };
    println!("cargo::rustc-env=KVTIDE_CUDA_CODE={code}");
    Ok(())
}

/// Leaves empty fatbins, so that the crate compiles all the same.
fn without_kernels(out: &Path, unasked: bool) -> Result<String> {
    ensure!(
        unasked || env::var_os("KVTIDE_REQUIRE_NVCC").is_none_or(|value| value != "1"),
        "nvcc was not found, and KVTIDE_REQUIRE_NVCC asks for it"
    );
    println!("cargo::rustc-cfg=kvtide_no_kernels");
    if !unasked {
        println!("cargo::warning=nvcc was not found: the CUDA backend will not open. Set NVCC or CUDA_HOME.");
    }
    for name in KERNELS {
        std::fs::write(fatbin(out, name), [])?;
    }
    Ok("none".into())
}

fn fatbin(out: &Path, name: &str) -> PathBuf {
    out.join(name).with_extension("fatbin")
}

/// The nvcc that the environment names, or the first one that runs.
fn find_nvcc() -> Result<Option<PathBuf>> {
    if let Some(nvcc) = env::var_os("NVCC") {
        let nvcc = PathBuf::from(nvcc);
        ensure!(runs(&nvcc), "NVCC is {}, which cannot be run", nvcc.display());
        return Ok(Some(nvcc));
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let homes = homes.chain(["/usr/local/cuda".into()]).map(|home| home.join("bin/nvcc"));
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join(".cuda/cu13/bin/nvcc");
    Ok(homes.chain(["nvcc".into(), here]).find(|nvcc| runs(nvcc)))
}

fn runs(nvcc: &Path) -> bool {
    output(nvcc, ["--version"]).is_ok()
}

/// What a command prints, when it succeeds.
fn output(program: &Path, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
    let output = Command::new(program).args(args).output().with_context(|| format!("running {}", program.display()))?;
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{} failed ({})\n{text}{errors}", program.display(), output.status);
    Ok(text.into_owned())
}

/// Compiles every kernel file, all at the same time, and says for what.
fn compile(nvcc: &Path, out: &Path) -> Result<String> {
    let archs = architectures(nvcc)?;
    let newest = *archs.last().context("no architecture to compile the kernels for")?;
    let mut targets: Vec<String> = archs.iter().map(|arch| format!("arch=compute_{arch},code=sm_{arch}")).collect();
    targets.push(format!("arch=compute_{newest},code=compute_{newest}"));
    let one = |name: &str| -> Result<()> {
        let threads = env::var("NUM_JOBS").unwrap_or_else(|_| "1".into());
        let mut args: Vec<String> = ["-fatbin", "-O3", "-std=c++17", "--threads", &threads].map(str::to_owned).into();
        args.extend(targets.iter().map(|target| format!("-gencode={target}")));
        args.push(format!("-o={}", fatbin(out, name).display()));
        args.push(format!("kernels/{name}.cu"));
        output(nvcc, args).map(drop)
    };
    std::thread::scope(|scope| {
        let all = KERNELS.map(|name| scope.spawn(move || one(name).with_context(|| format!("kernels/{name}.cu"))));
        all.into_iter().try_for_each(|thread| thread.join().expect("compiling does not panic"))
    })?;
    let native: Vec<String> = archs.iter().map(|arch| format!("sm_{arch}")).collect();
    Ok(format!("{}, compute_{newest}", native.join(", ")))
}

/// The architectures that were asked for and that this nvcc knows, in ascending order.
fn architectures(nvcc: &Path) -> Result<Vec<u32>> {
    let known = output(nvcc, ["--list-gpu-arch"])?;
    let known: Vec<u32> = known.lines().filter_map(|line| line.trim().strip_prefix("compute_")?.parse().ok()).collect();
    let asked = env::var("KVTIDE_CUDA_ARCHS").unwrap_or_else(|_| ARCHS.into());
    let mut archs = Vec::new();
    for arch in asked.split(',').map(str::trim) {
        match arch.parse::<u32>() {
            Ok(arch) if known.contains(&arch) => archs.push(arch),
            Ok(arch) => println!("cargo::warning={} does not know sm_{arch}: left out", nvcc.display()),
            Err(_) => bail!("KVTIDE_CUDA_ARCHS is {asked:?}, but a list such as 80,90 is expected"),
        }
    }
    archs.sort_unstable();
    archs.dedup();
    Ok(archs)
}
