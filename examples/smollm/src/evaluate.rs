//! What does a format of the KV cache cost? Every token of a text predicted from those before it, in bf16 pages and others.

use std::io::Write;
use std::time::Instant;

use anyhow::{Result, ensure};
use candle_core::DType;
use kvtide::KeyCalibration;
use serde::Serialize;

use crate::args::Args;
use crate::attention::{Attention, Timed};
use crate::generate::argmax;
use crate::model::Model;
use crate::plain::Format;

/// How a text goes through a cache.
#[derive(Serialize)]
struct Evaluation {
    backend: String,
    format: &'static str,
    calibrated: bool,
    tokens: usize,
    perplexity: f64,
    /// The share of positions where the most likely next token is the one of bf16 pages.
    same_choice: f64,
    kv_bytes_per_token: f64,
    tokens_per_second: f64,
    attention_seconds: f64,
}

/// Evaluates bf16 pages, then those of `--kv`, where it is int8 without and with the calibration given.
pub(crate) fn evaluate(args: &Args, model: &Model, tokens: &[u32], out: &mut impl Write) -> Result<()> {
    ensure!(tokens.len() > 1, "a text of two tokens or more is needed");
    let calibration = args.calibration(model.heads)?;
    let mut caches = vec![(Format::Bf16, None)];
    if args.kv != Format::Bf16 {
        caches.push((args.kv, None));
    }
    if calibration.is_some() {
        caches.push((args.kv, calibration));
    }
    let mut expected = None;
    let mut evaluations = Vec::new();
    for (format, calibration) in caches {
        let (mut evaluation, choices) = run(args, model, tokens, format, calibration)?;
        let expected = expected.get_or_insert_with(|| choices.clone());
        let same = choices.iter().zip(&*expected).filter(|(a, b)| a == b).count();
        evaluation.same_choice = same as f64 / choices.len() as f64;
        if !args.json {
            write_row(out, &evaluation, evaluations.is_empty())?;
        }
        evaluations.push(evaluation);
    }
    if args.json { Ok(writeln!(out, "{}", serde_json::to_string(&evaluations)?)?) } else { Ok(()) }
}

/// One run over the text, and the most likely token after each of its tokens.
fn run(
    args: &Args,
    model: &Model,
    tokens: &[u32],
    format: Format,
    calibration: Option<KeyCalibration>,
) -> Result<(Evaluation, Vec<u32>)> {
    let calibrated = calibration.is_some();
    let mut attention = Timed::new(args.attention_in(model.heads, tokens.len(), format, calibration)?);
    let (start, chunk) = (Instant::now(), args.chunk.get());
    let (mut surprise, mut choices) = (0.0, Vec::with_capacity(tokens.len()));
    for (index, run) in tokens.chunks(chunk).enumerate() {
        let hidden = model.hidden(run, index * chunk, &mut attention)?;
        let rows = model.logits(&hidden)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        let next = tokens[index * chunk + 1..].iter().map(Some).chain([None]);
        for (logits, next) in rows.iter().zip(next) {
            choices.push(argmax(logits)?);
            if let Some(&next) = next {
                surprise += log_sum_exp(logits) - f64::from(logits[next as usize]);
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let footprint = attention.footprint()?;
    let evaluation = Evaluation {
        backend: footprint.backend,
        format: format.name(),
        calibrated,
        tokens: tokens.len(),
        perplexity: (surprise / (tokens.len() - 1) as f64).exp(),
        same_choice: 1.0,
        kv_bytes_per_token: footprint.kv_bytes as f64 / tokens.len() as f64,
        tokens_per_second: tokens.len() as f64 / seconds,
        attention_seconds: attention.spent.as_secs_f64(),
    };
    Ok((evaluation, choices))
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    f64::from(largest) + logits.iter().map(|x| f64::from(x - largest).exp()).sum::<f64>().ln()
}

fn write_row(out: &mut impl Write, evaluation: &Evaluation, head: bool) -> Result<()> {
    if head {
        writeln!(out, "{} tokens on {}", evaluation.tokens, evaluation.backend)?;
        writeln!(
            out,
            "{:<18}{:>12}{:>14}{:>16}{:>12}",
            "KV", "perplexity", "same choice", "bytes a token", "tokens/s"
        )?;
    }
    let calibrated = if evaluation.calibrated { ", calibrated" } else { "" };
    let (name, same) = (format!("{}{calibrated}", evaluation.format), 100.0 * evaluation.same_choice);
    let Evaluation { perplexity, kv_bytes_per_token: bytes, tokens_per_second: speed, .. } = evaluation;
    Ok(writeln!(out, "{name:<18}{perplexity:>12.4}{same:>12.2} %{bytes:>16.0}{speed:>12.1}")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_sum_exp_is_that_of_the_definition_and_does_not_overflow() {
        let naive = [1.0f64, -2.0, 0.5].map(f64::exp).iter().sum::<f64>().ln();
        assert!((log_sum_exp(&[1.0, -2.0, 0.5]) - naive).abs() < 1e-7);
        assert!((log_sum_exp(&[1000.0, 1000.0]) - 1000.0 - 2f64.ln()).abs() < 1e-4);
    }
}
