//! What did a run cost? The final table, as text or as JSON.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use serde::Serialize;

use crate::attention::Footprint;
use crate::check::Difference;
use crate::generate::Answer;
use crate::plain::Format;

/// Everything that the example measures about one run.
#[derive(Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    footprint: Footprint,
    format: &'static str,
    prompt_tokens: usize,
    generated_tokens: usize,
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    seconds: f64,
    attention_seconds: f64,
    #[serde(flatten)]
    check: Option<Difference>,
}

impl Report {
    pub(crate) fn new(
        footprint: Footprint,
        format: Format,
        prompt_tokens: usize,
        answer: &Answer,
        attention: Duration,
        check: Option<Difference>,
    ) -> Self {
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        Self {
            footprint,
            format: format.name(),
            prompt_tokens,
            generated_tokens: answer.tokens.len(),
            prefill_tokens_per_second: rate(prompt_tokens, answer.prefill),
            decode_tokens_per_second: rate(answer.tokens.len(), answer.decode),
            seconds: (answer.prefill + answer.decode).as_secs_f64(),
            attention_seconds: attention.as_secs_f64(),
            check,
        }
    }
}

impl Report {
    /// Whether the reference, where it was asked, chose every token too.
    pub(crate) fn tokens_agree(&self) -> bool {
        self.check.as_ref().is_none_or(|check| check.first_other_token.is_none())
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, value: &dyn Display| writeln!(f, "{name:<26}{value}");
        let footprint = &self.footprint;
        line("backend", &footprint.backend)?;
        line("adapter", &footprint.adapter)?;
        line("prompt tokens", &self.prompt_tokens)?;
        line("generated tokens", &self.generated_tokens)?;
        match footprint.pages {
            Some(pages) => line("pages", &pages)?,
            None => line("pages", &"none")?,
        }
        line("bytes of KV", &footprint.kv_bytes)?;
        line("format of KV", &self.format)?;
        line("prompt tokens a second", &format_args!("{:.1}", self.prefill_tokens_per_second))?;
        line("tokens a second", &format_args!("{:.1}", self.decode_tokens_per_second))?;
        let (attention, all) = (self.attention_seconds, self.seconds);
        line("time in attention", &format_args!("{attention:.2} s of {all:.2} s"))?;
        if let Some(check) = &self.check {
            match check.first_other_token {
                Some(index) => {
                    let preference = check.preference_there.unwrap_or_default();
                    line("first token that differs", &format_args!("{index} (a choice by {preference} logits)"))?;
                }
                None => line("first token that differs", &"none")?,
            }
            line("largest logit difference", &check.largest_logit_difference)?;
        }
        Ok(())
    }
}
