//! How does a prompt become an answer? Prefill in chunks, then greedy decoding.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::attention::Attention;
use crate::model::Model;
use crate::tokenizer::ChatTokenizer;

/// What to generate and when to stop.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// Tokens of the prompt that run at a time.
    pub(crate) chunk: usize,
    /// Tokens to generate at most.
    pub(crate) tokens: usize,
    /// Whether to go on after the token that ends an answer.
    pub(crate) ignore_end: bool,
}

/// One generated answer.
pub(crate) struct Answer {
    /// Includes the token that ends the answer, if it came to that.
    pub(crate) tokens: Vec<u32>,
    /// The logits that each token was chosen from, if they were to be kept.
    pub(crate) logits: Vec<Vec<f32>>,
    pub(crate) prefill: Duration,
    pub(crate) decode: Duration,
}

impl Answer {
    /// Tokens a second, of a prompt of `prompt` tokens and of the answer.
    pub(crate) fn rates(&self, prompt: usize) -> [f64; 2] {
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        [rate(prompt, self.prefill), rate(self.tokens.len(), self.decode)]
    }
}

/// Runs the prompt in chunks and returns the logits after its last token.
pub(crate) fn prefill(model: &Model, prompt: &[u32], chunk: usize, attention: &mut dyn Attention) -> Result<Vec<f32>> {
    let mut stderr = std::io::stderr();
    let progress = stderr.is_terminal();
    let mut logits = Vec::new();
    for (index, tokens) in prompt.chunks(chunk).enumerate() {
        logits = model.forward(tokens, index * chunk, attention)?;
        if progress {
            let done = index * chunk + tokens.len();
            write!(stderr, "\rprefill: {done} of {} tokens", prompt.len())?;
        }
    }
    if progress {
        writeln!(stderr)?;
    }
    Ok(logits)
}

/// Answers the prompt, writing the text to `out` as it comes.
pub(crate) fn generate(
    model: &Model,
    tokenizer: &ChatTokenizer,
    prompt: &[u32],
    limits: Limits,
    keep_logits: bool,
    attention: &mut dyn Attention,
    out: &mut impl Write,
) -> Result<Answer> {
    ensure!(
        prompt.len() + limits.tokens <= model.context_length,
        "{} tokens of prompt and {} to generate exceed the model's {}",
        prompt.len(),
        limits.tokens,
        model.context_length
    );
    let mut answer = Answer { tokens: Vec::new(), logits: Vec::new(), prefill: Duration::ZERO, decode: Duration::ZERO };
    let mut text = tokenizer.stream();
    let start = Instant::now();
    let mut logits = prefill(model, prompt, limits.chunk, attention)?;
    answer.prefill = start.elapsed();

    let start = Instant::now();
    while answer.tokens.len() < limits.tokens {
        let token = argmax(&logits)?;
        let position = prompt.len() + answer.tokens.len();
        answer.tokens.push(token);
        if keep_logits {
            answer.logits.push(logits);
        }
        if token == tokenizer.end && !limits.ignore_end {
            break;
        }
        write!(out, "{}", text(token)?)?;
        out.flush()?;
        logits = model.forward(&[token], position, attention)?;
    }
    answer.decode = start.elapsed();
    writeln!(out)?;
    Ok(answer)
}

/// The token with the largest logit. All of them must be finite: a NaN would hide what went wrong.
pub(crate) fn argmax(logits: &[f32]) -> Result<u32> {
    ensure!(logits.iter().all(|x| x.is_finite()), "not all logits are finite");
    let largest = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    Ok(largest.context("no logits")?.0 as u32)
}
