//! Does the cache score its pages, wherever they are, and does ranking by score leave the answer alone?
#![cfg(feature = "conformance")]

mod twins;

use anyhow::Result;
use kvtide::predictor::Basis;
use kvtide::swap::{HighSpeedSwap, PolicyChoice, SwapConfig};
use kvtide::tiers::{FileTier, HostTier};
use kvtide::{Append, Error};
use twins::{PAGE, Twins, config, model, tensor};

fn predicted() -> SwapConfig {
    SwapConfig { policy: PolicyChoice::PredictedScore, ..config(40) }
}

/// The identity as a basis: scores are the largest q · k, rounded to bf16 on the way.
fn exact() -> Result<Basis> {
    let identity: Vec<f32> = (0..16 * 16).map(|at| if at / 16 == at % 16 { 1.0 } else { 0.0 }).collect();
    Ok(Basis::from_matrices(&model(), 16, &identity)?)
}

#[test]
fn scores_are_the_largest_products_of_each_page() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("store");
    let mut twins = Twins::new(40, HostTier::new(4 << 20))?;
    let build = |tier| {
        let builder = HighSpeedSwap::builder(twins.device.clone(), model()).config(predicted());
        builder.tier(tier).predictor(exact()?).build().map_err(anyhow::Error::from)
    };
    let mut swapped = build(FileTier::create(&path, 2 << 20))?;
    let seq = swapped.begin();
    let tokens = 70 * PAGE + 3;
    let keys = twins::values(1, (tokens * 2 * 16) as usize);
    let k = tensor(&twins.device, 1, tokens, 2)?;
    swapped.append(1, &[Append::new(&seq, tokens - 20, k.clone(), k.clone())])?;
    let rest = k.clone().from_row(u64::from(tokens) - 20);
    swapped.append(1, &[Append::new(&seq, 20, rest.clone(), rest)])?;
    let (query, q) = (twins::values(2, 4 * 16), tensor(&twins.device, 2, 1, 4)?);
    let want: Vec<f32> = (0..tokens.div_ceil(PAGE))
        .map(|page| {
            let products = (page * PAGE..((page + 1) * PAGE).min(tokens)).flat_map(|token| {
                let query = &query;
                let keys = &keys;
                (0..4usize).map(move |head| {
                    let row = |x: &[f32], at: usize| x[at * 16..(at + 1) * 16].to_vec();
                    let (q, k) = (row(query, head), row(keys, token as usize * 2 + head / 2));
                    q.iter().zip(&k).map(|(q, k)| q * k).sum::<f32>()
                })
            });
            products.fold(f32::MIN, f32::max)
        })
        .collect();
    let close = |scores: &[f32]| {
        assert_eq!(scores.len(), want.len());
        scores.iter().zip(&want).for_each(|(got, want)| assert!((got - want).abs() < 0.05, "{got} for {want}"));
    };
    close(&swapped.scores(1, &seq, &q)?);
    assert!(swapped.stats().store.held_pages > swapped.stats().resident_pages, "some pages are away");
    assert!(swapped.scores(0, &seq, &q)?.is_empty());

    // A reopened store projects pages as they come.
    swapped.close()?;
    let mut swapped = build_again(&twins, &path)?;
    let seq = swapped.take_restored().remove(0);
    assert!(swapped.scores(1, &seq, &q)?.iter().all(|score| *score == f32::NEG_INFINITY));
    std::mem::swap(&mut twins.swapped, &mut swapped);
    twins.attend_swapped(&seq, 1, 1, 5)?;
    close(&twins.swapped.scores(1, &seq, &q)?);
    Ok(())
}

fn build_again(twins: &Twins, path: &std::path::Path) -> Result<HighSpeedSwap<kvtide::backend::cpu::CpuBackend>> {
    let builder = HighSpeedSwap::builder(twins.device.clone(), model()).config(predicted());
    Ok(builder.tier(FileTier::open(path)).predictor(exact()?).build()?)
}

#[test]
fn ranking_by_score_changes_no_bit() -> Result<()> {
    let mut twins = Twins::new(40, HostTier::new(4 << 20))?;
    let builder = HighSpeedSwap::builder(twins.device.clone(), model()).config(predicted());
    let basis = Basis::gaussian(&model(), 8, 7)?;
    twins.swapped = builder.tier(HostTier::new(4 << 20)).predictor(basis).build()?;
    let (a, b) = (twins.begin(), twins.begin());
    twins.append(&a, 900, 1)?;
    twins.append(&b, 400, 2)?;
    for step in 0..12 {
        twins.append(&a, 5, 10 + step)?;
        twins.compare(&a, 2, step)?;
        twins.compare(&b, 1, step)?;
    }
    assert!(twins.swapped.is_consistent());
    assert!(twins.swapped.stats().streamed_pages > 100);
    Ok(())
}

#[test]
fn a_policy_that_needs_scores_needs_a_predictor() -> Result<()> {
    let twins = Twins::new(40, HostTier::new(1 << 20))?;
    let build =
        || HighSpeedSwap::builder(twins.device.clone(), model()).config(predicted()).tier(HostTier::new(1 << 20));
    assert!(matches!(build().build(), Err(Error::Config { field: "policy", .. })));
    let other = kvtide::Geometry::new(2, 4, 2, 32);
    let refused = build().predictor(Basis::gaussian(&other, 8, 1)?).build();
    assert!(matches!(refused, Err(Error::Shape { .. })), "{refused:?}");
    let seq = twins.swapped.geometry().layers();
    assert_eq!(seq, 2);
    Ok(())
}
