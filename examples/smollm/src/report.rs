//! What did a run cost? The final table, as text or as JSON.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use serde::Serialize;

use crate::attention::Footprint;
use crate::check::{Difference, Residence};
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
    #[serde(flatten)]
    residence: Option<Residence>,
}

impl Report {
    pub(crate) fn new(
        footprint: Footprint,
        format: Format,
        prompt_tokens: usize,
        answer: &Answer,
        attention: Duration,
        check: Option<Difference>,
        residence: Option<Residence>,
    ) -> Self {
        let [prefill, decode] = answer.rates(prompt_tokens);
        Self {
            footprint,
            format: format.name(),
            prompt_tokens,
            generated_tokens: answer.tokens.len(),
            prefill_tokens_per_second: prefill,
            decode_tokens_per_second: decode,
            seconds: (answer.prefill + answer.decode).as_secs_f64(),
            attention_seconds: attention.as_secs_f64(),
            check,
            residence,
        }
    }
}

impl Report {
    /// Whether the reference, where it was asked, chose every token too.
    pub(crate) fn tokens_agree(&self) -> bool {
        self.check.as_ref().is_none_or(|check| check.first_other_token.is_none())
    }

    /// Whether the run all on the device, where there was one, gave the same bits.
    pub(crate) fn bits_agree(&self) -> bool {
        self.residence.as_ref().is_none_or(|residence| residence.first_token_with_other_bits.is_none())
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
        if let Some(residence) = &self.residence {
            let prefill = residence.resident_prefill_tokens_per_second;
            let decode = residence.resident_decode_tokens_per_second;
            line("all on the device", &format_args!("{prefill:.1} prompt tokens a second, {decode:.1} tokens"))?;
            match residence.first_token_with_other_bits {
                Some(index) => line("bits differ", &format_args!("from token {index} on"))?,
                None => line("bits differ", &format_args!("in none of {} logits", residence.logits_compared))?,
            }
        }
        self.footprint.swap.as_ref().map_or(Ok(()), |swap| write!(f, "{swap}"))
    }
}
