//! How does text become tokens and tokens text? The GGUF file's own tokenizer and chat template.

use anyhow::{Context, Error, Result, ensure};
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

use crate::model::metadata;

/// SmolLM2's tokenizer.
pub(crate) struct ChatTokenizer {
    inner: Tokenizer,
    /// `<|im_start|>`
    start: u32,
    /// `<|im_end|>`, which also ends an answer.
    pub(crate) end: u32,
}

impl ChatTokenizer {
    /// Builds it from the vocabulary and the merges in the file.
    pub(crate) fn from_gguf(content: &Content) -> Result<Self> {
        let rules = metadata(content, "tokenizer.ggml.pre")?.to_string()?;
        ensure!(rules == "smollm", "the text must be split by the `smollm` rules, the file asks for `{rules}`");
        let mut inner = Tokenizer::from_gguf(content)?;
        // candle reads `smollm` as GPT-2; the model was trained with one token for each digit and
        // no space put in front of the text.
        inner.with_pre_tokenizer(Some(Sequence::new(vec![
            Digits::new(true).into(),
            ByteLevel::new(false, true, true).into(),
        ])));
        // `<|im_end|>` inside a user's text is text: only `chat` writes control tokens.
        inner.set_encode_special_tokens(true);
        let control = |token: &str| {
            let id = inner.token_to_id(token);
            id.with_context(|| format!("the vocabulary has no {token}"))
        };
        let (start, end) = (control("<|im_start|>")?, control("<|im_end|>")?);
        Ok(Self { inner, start, end })
    }

    /// The tokens of `text`, none of them a control token.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false);
        Ok(encoding.map_err(Error::from_boxed)?.get_ids().to_vec())
    }

    /// A system and a user message in the model's chat template, up to where the answer begins.
    pub(crate) fn chat(&self, system: &str, user: &str) -> Result<Vec<u32>> {
        let newline = self.encode("\n")?;
        let mut tokens = Vec::new();
        for (role, text) in [("system", system), ("user", user)] {
            tokens.push(self.start);
            tokens.extend(self.encode(&format!("{role}\n{text}"))?);
            tokens.push(self.end);
            tokens.extend(&newline);
        }
        tokens.push(self.start);
        tokens.extend(self.encode("assistant\n")?);
        Ok(tokens)
    }

    /// A decoder to feed one token at a time: each call returns the text that became complete,
    /// which is empty in the middle of a character and for control tokens.
    pub(crate) fn stream(&self) -> impl FnMut(u32) -> Result<String> {
        let mut stream = self.inner.decode_stream(true);
        move |token| Ok(stream.step(token).map_err(Error::from_boxed)?.unwrap_or_default())
    }
}
