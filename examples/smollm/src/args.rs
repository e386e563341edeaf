//! What can be asked for? The options, and the attention that they name.

use std::num::NonZero;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use kvtide::{Device, Geometry};

use crate::attention::{Attention, Heads};
use crate::paged::{self, Paged};
use crate::plain::{Format, Plain};
use crate::read;
use crate::room::Room;
use crate::store::Store;

/// Recitation: every answer token has to be found a thousand tokens back, so a wrong key or value shows at once.
const TASK: &str = "Repeat the text above word for word, from its beginning.";

/// Runs SmolLM2-135M-Instruct on the CPU, with its KV cache and its attention wherever you say.
#[derive(Parser)]
pub(crate) struct Args {
    /// The model's GGUF file [default: the one that scripts/fetch-model leaves in .models]
    #[arg(long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,
    /// A text to repeat [default: an essay on virtual memory]
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// What to say to the model instead
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// Tokens to generate at most
    #[arg(long, default_value_t = 200)]
    pub(crate) tokens: usize,
    /// Go on after the end of the answer
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Where the KV cache and the attention live
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) backend: Backend,
    /// Number format of the KV cache
    #[arg(long, value_enum, default_value = "bf16")]
    pub(crate) kv: Format,
    /// Tokens in a page
    #[arg(long, default_value = "16")]
    pub(crate) page_size: NonZero<usize>,
    /// Tokens of the prompt to run at a time
    #[arg(long, default_value = "256")]
    pub(crate) chunk: NonZero<usize>,
    #[command(flatten)]
    pub(crate) room: Room,
    /// Run it all again through plain contiguous attention and compare
    #[arg(long)]
    pub(crate) check: bool,
    /// Run it all again with every page on the device: each token and each bit of its logits must be the same
    #[arg(long, requires = "kv_budget")]
    pub(crate) check_resident: bool,
    /// Print the final table as one line of JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Only write the prompt's queries, keys and values to a safetensors file
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Without the model: run what `--record` wrote through the cache and through plain attention, and compare
    #[arg(long, value_name = "FILE", conflicts_with = "record")]
    pub(crate) replay: Option<PathBuf>,
    /// Layers to record
    #[arg(long, value_delimiter = ',', default_value = "0,7,20")]
    pub(crate) record_layers: Vec<usize>,
    /// Tokens of the prompt to record
    #[arg(long, default_value_t = 320)]
    pub(crate) record_tokens: usize,
    /// Only print the perplexity of the first 1,024 tokens of a text
    #[arg(long, value_name = "FILE")]
    pub(crate) perplexity: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Backend {
    Auto,
    Cpu,
    Wgpu,
    Cuda,
    /// No pages: what `--check` compares with
    Plain,
}

impl Args {
    pub(crate) fn prompt(&self) -> Result<String> {
        if let Some(prompt) = &self.prompt {
            return Ok(prompt.clone());
        }
        let text = match &self.prompt_file {
            Some(file) => read(file)?,
            None => include_str!("../prompt.txt").to_string(),
        };
        Ok(format!("{}\n\n{TASK}", text.trim()))
    }

    /// The attention asked for, over a cache for `tokens` tokens.
    pub(crate) fn attention(&self, heads: Heads, tokens: usize) -> Result<Box<dyn Attention>> {
        if let Backend::Plain = self.backend {
            ensure!(!self.room.is_bounded(), "there are no pages that could leave the device: name another backend");
            return Ok(Box::new(Plain::new(heads, self.kv)));
        }
        let store = self.room.store(self.device()?, self.geometry(heads)?, tokens)?;
        Ok(Box::new(Paged::new(store, heads)?))
    }

    /// The same with every page on the device.
    pub(crate) fn resident(&self, heads: Heads) -> Result<Paged> {
        Paged::new(Store::resident(self.device()?, self.geometry(heads)?)?, heads)
    }

    fn device(&self) -> Result<Device> {
        Ok(Device::open(&format!("{:?}", self.backend).to_lowercase())?)
    }

    fn geometry(&self, heads: Heads) -> Result<Geometry> {
        paged::geometry(heads, self.kv, self.page_size.get())
    }
}
