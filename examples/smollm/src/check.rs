//! Is the attention right? The same tokens through another attention, and the same run all on the device.

use anyhow::Result;
use serde::Serialize;

use crate::attention::Attention;
use crate::generate::{Answer, argmax, prefill};
use crate::model::Model;

/// How an answer compares with the reference.
#[derive(Serialize)]
pub(crate) struct Difference {
    /// The first generated token for which the reference, given the same tokens before it, chooses
    /// another.
    pub(crate) first_other_token: Option<usize>,
    /// How much the reference preferred its own choice there, in logits: noise of rounded keys and values turns a
    /// choice that is closer than the largest difference below.
    pub(crate) preference_there: Option<f32>,
    /// Over all generated tokens and the whole vocabulary.
    pub(crate) largest_logit_difference: f32,
}

/// How an answer compares with the one of a cache that is all on the device: contract C1 allows no difference.
#[derive(Serialize)]
pub(crate) struct Residence {
    pub(crate) resident_prefill_tokens_per_second: f64,
    pub(crate) resident_decode_tokens_per_second: f64,
    pub(crate) logits_compared: usize,
    /// The first generated token that is another one, or was chosen from logits that differ in a bit.
    pub(crate) first_token_with_other_bits: Option<usize>,
}

/// Compares an answer to `prompt` tokens with the one of a cache that is all on the device, bit by bit.
pub(crate) fn residence(prompt: usize, answer: &Answer, resident: &Answer) -> Residence {
    let [prefill, decode] = resident.rates(prompt);
    let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let same = |at: usize| {
        let [one, other] = [answer, resident].map(|answer| answer.tokens.get(at).zip(answer.logits.get(at)));
        matches!((one, other), (Some((a, x)), Some((b, y))) if a == b && bits(x) == bits(y))
    };
    let tokens = answer.tokens.len().max(resident.tokens.len());
    Residence {
        resident_prefill_tokens_per_second: prefill,
        resident_decode_tokens_per_second: decode,
        logits_compared: answer.logits.iter().map(Vec::len).sum(),
        first_token_with_other_bits: (0..tokens).find(|&at| !same(at)),
    }
}

/// Lets `reference` see the prompt and the answer and compares its logits with the answer's.
pub(crate) fn replay(
    model: &Model,
    prompt: &[u32],
    chunk: usize,
    answer: &Answer,
    reference: &mut dyn Attention,
) -> Result<Difference> {
    let mut expected = prefill(model, prompt, chunk, reference)?;
    let mut difference = Difference { first_other_token: None, preference_there: None, largest_logit_difference: 0.0 };
    for (index, (&token, logits)) in answer.tokens.iter().zip(&answer.logits).enumerate() {
        let best = argmax(&expected)?;
        if best != token && difference.first_other_token.is_none() {
            difference.first_other_token = Some(index);
            difference.preference_there = Some(expected[best as usize] - expected[token as usize]);
        }
        let gaps = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs());
        let largest = &mut difference.largest_logit_difference;
        *largest = gaps.fold(*largest, f32::max);
        expected = model.forward(&[token], prompt.len() + index, reference)?;
    }
    Ok(difference)
}
