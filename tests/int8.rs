//! What does int8 cost on a real model's tensors? Attention over int8 pages against the same tensors in bf16 pages.
//!
//! Figures are printed: `cargo test --features conformance --test int8 -- --nocapture`, with `KVTIDE_DUMP=FILE` for a
//! larger file's tensors.
#![cfg(feature = "conformance")]

mod real;

use anyhow::Result;
use kvtide::attention::reference::{self, Context};
use kvtide::backend::cpu::{CpuBackend, CpuBuffer};
use kvtide::{
    Append, Dtype, KeyCalibration, KeyCheck, KeyStatistics, PageFormat, PagedStore, Query, Rows, View, quantize,
};
use real::Layer;

/// The KV head whose keys get biases.
const BIASED: usize = 2;

/// A store with a layer's keys and values, and its attention output `[row, q_head, dim]` with a check of its keys.
fn attend(layer: &Layer, format: PageFormat, calibration: Option<KeyCalibration>) -> Result<(Vec<f32>, KeyCheck)> {
    let (device, geometry) = (CpuBackend::new(), layer.geometry.format(format));
    let tensor = |values: &[f32], heads| -> Result<View<CpuBuffer>> {
        let buffer = device.buffer_from(bytemuck::cast_slice(values))?;
        Ok(View::dense(buffer, Dtype::F32, heads, geometry.k_dim()))
    };
    let mut store = PagedStore::new(device.clone(), geometry)?;
    if let Some(calibration) = calibration {
        store.calibrate_keys(calibration)?;
    }
    let seq = store.begin();
    let (k, v) = (tensor(&layer.k, geometry.kv_heads())?, tensor(&layer.v, geometry.kv_heads())?);
    store.append(0, &[Append::new(&seq, layer.tokens() as u32, k, v)])?;
    let mut output = vec![0.0f32; layer.q.len()];
    let (q, out) = (tensor(&layer.q, geometry.q_heads())?, tensor(&output, geometry.q_heads())?);
    let rows: Vec<Rows> = layer.sees.iter().map(|&sees| Rows::at(&seq, sees as u64 - 1, 1)).collect();
    store.attend(0, &Query::new(&rows, q, out.clone()))?;
    store.download(&out.buffer, 0, bytemuck::cast_slice_mut(&mut output))?;
    Ok((output, store.check_keys(0, &seq)?))
}

fn calibration(layer: &Layer) -> Result<KeyCalibration> {
    let mut statistics = KeyStatistics::new(&layer.geometry)?;
    statistics.add(0, &layer.k)?;
    Ok(statistics.calibration()?)
}

/// Relative L2 error over all rows.
fn error(got: &[f64], want: &[f64]) -> f64 {
    let size: f64 = want.iter().map(|x| x * x).sum();
    (got.iter().zip(want).map(|(a, b)| (a - b).powi(2)).sum::<f64>() / size).sqrt()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x.into()).collect()
}

/// The output of float64 attention over keys and values as they are.
fn oracle(layer: &Layer, v: Vec<f32>) -> Vec<f64> {
    let heads = reference::Heads::from(&layer.geometry);
    let context = Context { k: layer.k.clone(), v };
    let rows = layer.q.chunks_exact(heads.q_heads * heads.k_dim).zip(&layer.sees);
    rows.flat_map(|(q, &sees)| reference::attend(q, &context, heads, 0..sees, (heads.k_dim as f32).powf(-0.5)).0)
        .collect()
}

#[test]
fn int8_costs_3_percent_of_a_layer_at_most_and_values_half_of_that() -> Result<()> {
    for layer in real::layers()? {
        let dim = layer.geometry.k_dim() as usize;
        let (bf16, _) = attend(&layer, PageFormat::Bf16, None)?;
        let (int8, check) = attend(&layer, PageFormat::Int8, None)?;
        let calibrated = attend(&layer.half(1), PageFormat::Int8, Some(calibration(&layer.half(0))?))?.0;
        let (half, _) = attend(&layer.half(1), PageFormat::Bf16, None)?;
        let (both, calibrated) = (error(&wide(&int8), &wide(&bf16)), error(&wide(&calibrated), &wide(&half)));
        let mut v = layer.v.clone();
        let mut codes = vec![0; dim];
        for row in v.chunks_exact_mut(dim) {
            let scale = quantize::row(row, &mut codes);
            row.iter_mut().zip(&codes).for_each(|(x, &code)| *x = f32::from(code) * scale);
        }
        let values = error(&oracle(&layer, v), &oracle(&layer, layer.v.clone()));
        println!(
            "layer {}: int8 {:.2} %, calibrated {:.2} %, V alone {:.2} %; noise of each head {:.3?}",
            layer.number,
            100.0 * both,
            100.0 * calibrated,
            100.0 * values,
            check.noise()
        );
        assert!(both <= 0.03 && calibrated <= 0.03 && values <= 0.013, "layer {}: too far off", layer.number);
        assert!(values <= both, "layer {}: K and V cost less than V alone", layer.number);
        assert!(!check.hurts(), "layer {}: {check:?}", layer.number);
    }
    Ok(())
}

#[test]
fn biased_keys_are_told_from_their_first_tokens_and_need_a_calibration() -> Result<()> {
    for layer in real::layers()? {
        let biased = layer.biased(BIASED);
        // Calibrated on tokens that are not among those tested.
        let (known, tested) = (biased.half(0), biased.half(1));
        let (dim, group) = (layer.geometry.k_dim() as usize, layer.geometry.group() as usize);
        // What the query heads of that KV head give.
        let own = |output: &[f32]| -> Vec<f64> {
            let rows = output.chunks_exact(layer.geometry.q_heads() as usize * dim);
            rows.flat_map(|row| wide(&row[BIASED * group * dim..][..group * dim])).collect()
        };
        let (bf16, would) = attend(&tested, PageFormat::Bf16, None)?;
        let (plain, told) = attend(&tested, PageFormat::Int8, None)?;
        let (calibrated, left) = attend(&tested, PageFormat::Int8, Some(calibration(&known)?))?;
        let (plain, calibrated) = (error(&own(&plain), &own(&bf16)), error(&own(&calibrated), &own(&bf16)));
        println!(
            "layer {} biased: int8 {:.1} %, calibrated {:.2} %; noise {:.3} as bf16, {:.3} as int8, {:.3} calibrated",
            layer.number,
            100.0 * plain,
            100.0 * calibrated,
            would.worst().1,
            told.worst().1,
            left.worst().1
        );
        // The first layer attends to nearly everything alike, so that wrong scores change little.
        let least = if layer.number == 0 { 0.02 } else { 0.1 };
        assert!(plain > least, "layer {}: {plain} in plain int8", layer.number);
        assert!(calibrated <= 0.03, "layer {}: {calibrated} calibrated", layer.number);
        for check in [would, told] {
            assert!(check.hurts() && check.worst().0 == BIASED, "layer {}: {check:?}", layer.number);
            assert!(check.noise()[..BIASED].iter().all(|&noise| noise < KeyCheck::LIMIT));
        }
        assert!(!left.hurts(), "layer {}: {left:?}", layer.number);
    }
    Ok(())
}
