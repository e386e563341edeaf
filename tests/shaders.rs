//! Is every shader that the wgpu backend may compile portable? No device is needed: naga translates each variant for
//! every API, our own audits check what naga does not, and Tint (Chrome's compiler) reads them all when it is there.
//!
//! ```text
//! eval "$(scripts/setup-tint)"; eval "$(scripts/setup-vulkan)"; cargo test --test shaders
//! ```
#![cfg(feature = "wgpu")]

#[path = "shaders/uniformity.rs"]
mod uniformity;

use anyhow::{Context, Result, anyhow, ensure};
use kvtide::backend::params::layouts;
use kvtide::backend::wgpu::{ShaderVariant, WORKGROUP_BYTES, shader_variants};
use naga::back::{PipelineConstants, hlsl, msl, spv};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, Module, ShaderStage, StorageAccess, TypeInner};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::panic::catch_unwind;
use std::path::PathBuf;
use std::process::Command;

const DEFAULT_WORKGROUP_BYTES: u32 = 16_384;
const DEFAULT_STORAGE_BUFFERS: u32 = 8;
const DEFAULT_INVOCATIONS: u32 = 256;

/// What WebGPU guarantees of all that naga counts as a capability and that kernels use: `unpack2x16float`.
const CAPABILITIES: Capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;

/// A variant that naga accepts without any optional capability but subgroups, its overrides still open.
fn parse(wgsl: &str, subgroups: bool) -> Result<(Module, ModuleInfo)> {
    let optional = if subgroups { Capabilities::SUBGROUP } else { Capabilities::empty() };
    let module = naga::front::wgsl::parse_str(wgsl).map_err(|error| anyhow!(error.emit_to_string(wgsl)))?;
    let info = Validator::new(ValidationFlags::all(), CAPABILITIES | optional)
        .validate(&module)
        .map_err(|error| anyhow!(error.emit_to_string(wgsl)))?;
    Ok((module, info))
}

fn for_each_variant(check: impl Fn(&ShaderVariant, &Module, &ModuleInfo) -> Result<()>) {
    let failed: Vec<_> = shader_variants()
        .iter()
        .filter_map(|variant| {
            let checked =
                parse(&variant.wgsl, variant.subgroups).and_then(|(module, info)| check(variant, &module, &info));
            checked.err().map(|error| format!("{}: {error:#}", variant.name))
        })
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

fn specialised<'a>(
    variant: &ShaderVariant,
    module: &'a Module,
    info: &'a ModuleInfo,
) -> Result<(Cow<'a, Module>, Cow<'a, ModuleInfo>)> {
    let constants: PipelineConstants = variant.constants.iter().map(|(name, value)| ((*name).into(), *value)).collect();
    Ok(naga::back::pipeline_constants::process_overrides(
        module,
        info,
        Some((ShaderStage::Compute, variant.entry)),
        &constants,
    )?)
}

#[test]
fn names_are_unique_and_no_entry_point_is_called_main() {
    let variants = shader_variants();
    let names: HashSet<_> = variants.iter().map(|variant| &variant.name).collect();
    assert_eq!(names.len(), variants.len());
    assert!(variants.iter().all(|variant| variant.entry != "main"));
}

#[test]
fn every_variant_translates_for_every_api() {
    for_each_variant(|variant, module, info| {
        let (module, info) = specialised(variant, module, info)?;
        let entry = || Some((ShaderStage::Compute, variant.entry.to_owned()));
        let translate = || -> Result<()> {
            spv::write_vec(&module, &info, &spv::Options::default(), None).context("SPIR-V")?;
            let options = msl::Options { lang_version: (2, 4), ..Default::default() };
            let pipeline = msl::PipelineOptions { entry_point: entry(), ..Default::default() };
            let (_, names) = msl::write_string(&module, &info, &options, &pipeline).context("MSL")?;
            ensure!(names.entry_point_names.iter().all(|name| name.is_ok()), "MSL: {:?}", names.entry_point_names);
            let options = hlsl::Options { shader_model: hlsl::ShaderModel::V6_0, ..Default::default() };
            let pipeline = hlsl::PipelineOptions { entry_point: entry() };
            hlsl::Writer::new(&mut String::new(), &options, &pipeline).write(&module, &info, None).context("HLSL")?;
            Ok(())
        };
        let translate = std::panic::AssertUnwindSafe(translate);
        catch_unwind(translate).map_err(|_| anyhow!("naga panicked"))?
    });
}

#[test]
fn every_variant_keeps_to_the_default_limits() {
    for_each_variant(|variant, module, info| {
        let (module, info) = specialised(variant, module, info)?;
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx())?;
        let (at, entry) = module
            .entry_points
            .iter()
            .enumerate()
            .find(|(_, entry)| entry.name == variant.entry)
            .context("the entry point is missing")?;
        let invocations: u32 = entry.workgroup_size.iter().product();
        ensure!(invocations <= DEFAULT_INVOCATIONS, "{invocations} invocations");
        let (mut workgroup, mut storage) = (0, 0);
        for (handle, global) in module.global_variables.iter() {
            if info.get_entry_point(at)[handle].is_empty() {
                continue;
            }
            match global.space {
                AddressSpace::WorkGroup => workgroup += layouter[global.ty].size.next_multiple_of(16),
                AddressSpace::Storage { .. } => storage += 1,
                _ => {}
            }
        }
        ensure!(workgroup <= WORKGROUP_BYTES, "{workgroup} bytes of workgroup memory, not {WORKGROUP_BYTES}");
        ensure!(workgroup <= DEFAULT_WORKGROUP_BYTES, "{workgroup} bytes of workgroup memory");
        ensure!(storage <= variant.storage, "{storage} storage buffers, not {}", variant.storage);
        // What takes the place of two kernels may need more, because the backend asks whether it fits.
        let most = DEFAULT_STORAGE_BUFFERS.max(variant.slabs + 4);
        let optional = variant.name.starts_with("append-project");
        ensure!(storage <= most || optional, "{storage} storage buffers with {} slabs", variant.slabs);
        Ok(())
    });
}

/// A kernel that reads the arena binds it read-only: a writable binding costs a barrier between dispatches.
#[test]
fn only_kernels_that_write_the_arena_bind_it_writable() {
    for_each_variant(|variant, module, _| {
        let readers = ["attend", "gather", "project", "score"];
        let reads = readers.iter().any(|reader| variant.name.starts_with(reader));
        for (_, global) in module.global_variables.iter() {
            let slab = global.name.as_deref().is_some_and(|name| name.starts_with("slab"));
            if let (true, AddressSpace::Storage { access }) = (slab, global.space) {
                ensure!(access.contains(StorageAccess::STORE) != reads, "{:?}", global.name);
            }
        }
        Ok(())
    });
}

#[test]
fn no_barrier_is_reached_by_some_threads_only() {
    for_each_variant(|_, module, _| {
        let found = uniformity::divergent_barriers(module);
        ensure!(found.is_empty(), "{}", found.join(", "));
        Ok(())
    });
}

/// The audit itself: what it must flag, and what it must not.
#[test]
fn the_barrier_audit_tells_good_from_bad() {
    let shader = |body: &str| {
        format!(
            "struct P {{ n: u32 }}
            @group(0) @binding(0) var<uniform> p: P;
            @group(0) @binding(1) var<storage, read> r: array<u32>;
            @group(0) @binding(2) var<storage, read_write> w: array<u32>;
            var<workgroup> shared_n: u32;
            fn pick(i: u32) -> u32 {{ if (i > 3u) {{ return r[i]; }} return p.n; }}
            fn told(i: u32) -> u32 {{ if (i == 0u) {{ shared_n = 3u; }} return workgroupUniformLoad(&shared_n); }}
            fn waits(i: u32) {{ w[i] = 1u; workgroupBarrier(); }}
            fn written(i: u32) -> u32 {{ return w[i]; }}
            @compute @workgroup_size(64) fn f(
                @builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32
            ) {{ {body} }}"
        )
    };
    let good = [
        "workgroupBarrier();",
        "if (group.x >= p.n) { return; } workgroupBarrier();",
        "for (var i = 0u; i < r[group.x]; i++) { workgroupBarrier(); }",
        "let n = pick(group.x); if (n > 2u) { workgroupBarrier(); }",
        "var n = p.n; while (n > 0u) { if (r[n] == 0u) { break; } n >>= 1u; workgroupBarrier(); }",
        "for (var i = thread; i < 9u; i++) { w[i] = 1u; } workgroupBarrier();",
        "if (thread < 3u) { w[thread] = 1u; } workgroupBarrier(); if (thread > 0u) { return; } w[0] = 1u;",
        "if (thread == 0u) { shared_n = 3u; } let n = workgroupUniformLoad(&shared_n); if (n > 1u) { workgroupBarrier(); }",
        "let n = told(thread); if (n > 1u) { workgroupBarrier(); }",
        "waits(thread); if (p.n > 3u) { waits(thread); }",
    ];
    let bad = [
        "if (thread < 32u) { workgroupBarrier(); }",
        "if (thread >= p.n) { return; } workgroupBarrier();",
        "for (var i = thread; i < 9u; i++) { workgroupBarrier(); }",
        "if (w[group.x] > 0u) { workgroupBarrier(); }",
        "let n = written(group.x); if (n > 2u) { workgroupBarrier(); }",
        "let n = pick(thread); if (n > 2u) { workgroupBarrier(); }",
        "var n = 0u; if (thread > 3u) { n = 1u; } if (n == 0u) { workgroupBarrier(); }",
        "for (var i = 0u; i < p.n; i++) { if (i == thread) { break; } workgroupBarrier(); }",
        "for (var i = 0u; i < p.n; i++) { workgroupBarrier(); if (i == thread) { continue; } workgroupBarrier(); }",
        "shared_n = 3u; if (shared_n > 1u) { workgroupBarrier(); }",
        "switch thread { case 1u: { workgroupBarrier(); } default: {} }",
        "if (thread > 3u) { waits(thread); }",
        "if (thread > 3u) { let n = told(thread); w[0] = n; }",
    ];
    // In functions that wait for some of their arguments only.
    let bad_functions = [
        "fn some(i: u32) { if (i > 3u) { workgroupBarrier(); } }",
        "fn some(i: u32) { for (var j = 0u; j < i; j++) { waits(j); } }",
    ];

    for body in good {
        let found = uniformity::divergent_barriers(&parse(&shader(body), false).unwrap().0);
        assert!(found.is_empty(), "{body}: {found:?}");
    }
    for body in bad {
        let found = uniformity::divergent_barriers(&parse(&shader(body), false).unwrap().0);
        assert!(!found.is_empty(), "not flagged: {body}");
    }
    for function in bad_functions {
        let found = uniformity::divergent_barriers(&parse(&(shader("some(p.n);") + function), false).unwrap().0);
        assert!(!found.is_empty(), "not flagged: {function}");
    }
}

/// Offsets and sizes of the structs that the host fills, as naga reads them.
#[test]
fn structs_have_the_layout_of_the_host() {
    let expected: HashMap<_, _> = layouts().into_iter().map(|(name, size, fields)| (name, (size, fields))).collect();
    let seen = std::cell::RefCell::new(HashSet::new());
    for_each_variant(|_, module, _| {
        for (_, ty) in module.types.iter() {
            let (Some(name), TypeInner::Struct { members, span }) = (ty.name.as_deref(), &ty.inner) else { continue };
            let Some((size, fields)) = expected.get(name) else { continue };
            let offset = |field: &str| fields.iter().find(|(known, _)| *known == field).map(|(_, offset)| *offset);
            let mut next = 0;
            for member in members {
                // WGSL spells an array of reserved words out, and `from` and `to` are no names there.
                let spelled = member.name.as_deref().unwrap_or_default();
                let reserved = spelled.starts_with("reserved");
                let field = if reserved { "reserved" } else { spelled.trim_end_matches("_index") };
                match offset(field) {
                    Some(offset) if reserved => ensure!(member.offset as usize >= offset, "{name}.{spelled}"),
                    Some(offset) => ensure!(member.offset as usize == offset, "{name}.{spelled} at {}", member.offset),
                    None => return Err(anyhow!("{name} has no field {spelled} on the host")),
                }
                next = member.offset as usize + 4;
            }
            // Only reserved words may be left out, and a uniform block not even those.
            let missing = fields.iter().filter(|(field, offset)| *offset >= next && *field != "reserved").count();
            ensure!(missing == 0 || members.iter().any(|m| m.name.as_deref() == Some("record")), "{name} lacks fields");
            ensure!(!name.ends_with("Params") || *span as usize == *size, "{name} has {span} bytes, not {size}");
            seen.borrow_mut().insert(name.to_owned());
        }
        Ok(())
    });
    let missing: Vec<_> = expected.keys().filter(|name| !seen.borrow().contains(**name)).collect();
    assert!(missing.is_empty(), "no shader has {missing:?}");
}

/// Writes every variant to a folder, with its constants beside it, and has Tint read them all.
#[test]
fn tint_accepts_every_variant() {
    let folder = std::env::var_os("KVTIDE_WGSL_OUT").map_or_else(
        || {
            let own = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("wgsl");
            let _ = std::fs::remove_dir_all(&own);
            own
        },
        PathBuf::from,
    );
    std::fs::create_dir_all(&folder).unwrap();
    for variant in shader_variants() {
        let file = folder.join(variant.name);
        let enable = if variant.subgroups { "enable subgroups;\n" } else { "" };
        std::fs::write(file.with_extension("wgsl"), enable.to_owned() + &variant.wgsl).unwrap();
        let constants: serde_json::Map<_, _> =
            variant.constants.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        // With more slabs than the default limits allow, no pipeline can be made, but the text can be checked. Drivers take
        // seconds for those of attend, which differ in the loads alone.
        let pipelines = variant.storage <= DEFAULT_STORAGE_BUFFERS && (variant.slabs <= 1 || variant.entry != "attend");
        let features: &[&str] = if variant.subgroups { &["subgroups"] } else { &[] };
        let sidecar = serde_json::json!({ "constants": constants, "features": features, "pipelines": pipelines });
        std::fs::write(file.with_extension("json"), sidecar.to_string()).unwrap();
    }
    if std::env::var_os("KVTIDE_TINT").is_none() {
        println!("tint_accepts_every_variant: Tint was not run, because KVTIDE_TINT is not set (scripts/setup-tint)");
        return;
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/tint-check.mjs");
    let output = Command::new("node").arg(script).arg(&folder).output().expect("node can be run");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    println!("{text}");
    assert!(output.status.success(), "{text}");
}
