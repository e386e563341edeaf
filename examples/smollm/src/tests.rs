//! Does the example's cache give the same bits when its pages leave the device? Without the model, on the CPU.

use std::{env, fs, process};

use anyhow::Result;
use clap::Parser;
use kvtide::KeyCalibration;

use crate::args::Args;
use crate::attention::{Attention, Heads};
use crate::plain::{Format, Plain};
use crate::replay::Recording;

const HEADS: Heads = Heads { layers: 3, query: 4, kv: 2, dim: 16 };
const TOKENS: usize = 1100;
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/smollm2-fixture.safetensors");

fn args(options: &[&str]) -> Args {
    Args::parse_from(["smollm", "--backend", "cpu"].iter().chain(options))
}

/// Numbers between -1 and 1 without an obvious order.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i + seed) * 7919 % 2003) as f32 / 1001.0 - 1.0).collect()
}

/// The bits of what attention returns, for a prompt in chunks and single tokens after it.
fn outputs(attention: &mut dyn Attention) -> Result<Vec<u32>> {
    let mut outputs = Vec::new();
    let mut position = 0;
    while position < TOKENS {
        let rows = if position < 1024 { 256 } else { 1 };
        for layer in 0..HEADS.layers {
            let seed = position * 31 + layer * 7;
            let q = numbers(rows * HEADS.query * HEADS.dim, seed);
            let [k, v] = [1, 2].map(|part| numbers(rows * HEADS.kv * HEADS.dim, seed + part * 1009));
            outputs.extend(attention.attend(layer, position, rows, &q, &k, &v)?.into_iter().map(f32::to_bits));
        }
        position += rows;
    }
    Ok(outputs)
}

#[test]
fn a_quarter_on_the_device_gives_the_bits_of_all_of_it() -> Result<()> {
    let expected = outputs(&mut args(&[]).resident(HEADS)?)?;
    for tier in ["host", "file", "cascade"] {
        let mut attention = args(&["--kv-budget", "1/4", "--tier", tier]).attention(HEADS, TOKENS)?;
        assert!(outputs(&mut *attention)? == expected, "{tier}: the bits differ");
        let swap = attention.footprint()?.swap.expect("a store that swaps");
        assert!(swap.stats.streamed_pages > 1000, "{tier}: {swap}");
        let levels: Vec<&str> = swap.stats.tiers.iter().map(|level| level.tier).collect();
        assert_eq!(levels, if tier == "cascade" { vec!["host", "file"] } else { vec![tier] });
    }
    Ok(())
}

#[test]
fn recorded_tensors_replay_through_a_third_of_their_pages() -> Result<()> {
    let recording = Recording::read(FIXTURE.as_ref())?;
    let room = args(&["--kv-budget", "1/3", "--tier", "file"]);
    let mut attention = room.attention(recording.heads, recording.tokens)?;
    let mut resident = args(&[]).resident(recording.heads)?;
    let errors = recording.compare(256, &mut *attention, &mut resident)?;
    assert!(errors.iter().all(|error| error.relative_l2 == 0.0));
    assert!(attention.footprint()?.swap.is_some_and(|swap| swap.stats.streamed_pages > 0));
    Ok(())
}

#[test]
fn a_budget_that_moves_no_page_is_an_error() -> Result<()> {
    let mut attention = args(&["--kv-budget", "1/2"]).attention(HEADS, TOKENS)?;
    let (q, kv) = (numbers(HEADS.query * HEADS.dim, 1), numbers(HEADS.kv * HEADS.dim, 2));
    attention.attend(0, 0, 1, &q, &kv, &kv)?;
    let error = attention.footprint().map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("no page was streamed"), "{error}");
    assert!(args(&["--kv-budget", "1024"]).attention(HEADS, TOKENS).is_err());
    Ok(())
}

#[test]
fn int8_pages_hold_what_plain_attention_rounds_to_with_a_calibration_and_without() -> Result<()> {
    let recording = Recording::read(FIXTURE.as_ref())?;
    let (heads, file) = (recording.heads, env::temp_dir().join(format!("kvtide-smollm-keys-{}", process::id())));
    let channels = heads.layers * heads.kv * heads.dim;
    let mean = (0..channels).map(|at| (at % 7) as f32 - 3.0).collect();
    let scale = (0..channels).map(|at| 0.5 + (at % 3) as f32).collect();
    let geometry = args(&[]).geometry(heads, Format::Int8)?;
    KeyCalibration::new(&geometry, mean, scale)?.save(&file)?;
    let path = file.display().to_string();
    for options in [&["--kv", "int8"][..], &["--kv", "int8", "--calibration", &path]] {
        let int8 = args(options);
        let mut pages = int8.attention(heads, recording.tokens)?;
        let mut plain = Plain::new(heads, Format::Int8, int8.calibration(heads)?);
        let errors = recording.compare(256, &mut *pages, &mut plain)?;
        assert!(errors.iter().all(|error| error.relative_l2 < 1e-5), "{options:?}");
        assert_eq!(pages.footprint()?.kv_bytes, 3 * 20 * 3 * 16 * 2 * (64 + 4), "three layers of 20 pages");
        let room = args(&[options, &["--kv-budget", "1/3", "--tier", "file"]].concat());
        let mut swapped = room.attention(heads, recording.tokens)?;
        let errors = recording.compare(256, &mut *swapped, &mut int8.resident(heads)?)?;
        assert!(errors.iter().all(|error| error.relative_l2 == 0.0), "{options:?}: the bits differ in a tier");
    }
    assert!(args(&["--calibration", &path]).attention(heads, 16).is_err(), "bf16 pages have no calibration");
    fs::remove_file(file)?;
    Ok(())
}
