//! What can be asked for? The options, and the attention that they name.

use std::num::NonZero;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use kvtide::{Device, Geometry, KeyCalibration};

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
    /// Tokens to generate at most [default: 200], or of a text to evaluate or to calibrate on [default: 2048]
    #[arg(long)]
    tokens: Option<usize>,
    /// Go on after the end of the answer
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Where the KV cache and the attention live
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) backend: Backend,
    /// Number format of the KV cache
    #[arg(long, value_enum, default_value = "bf16")]
    pub(crate) kv: Format,
    /// Centre and scale keys before they become int8, by a file that `--calibrate` wrote
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
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
    /// Only write a calibration of the model's keys over `--prompt-file` or the essay
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "calibration"])]
    pub(crate) calibrate: Option<PathBuf>,
    /// Only predict every token of a text from those before it: in bf16 pages, and as `--kv` and `--calibration` say
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["calibrate", "record", "replay"])]
    pub(crate) evaluate: Option<PathBuf>,
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
        match &self.prompt {
            Some(prompt) => Ok(prompt.clone()),
            None => Ok(format!("{}\n\n{TASK}", self.text()?.trim())),
        }
    }

    /// The prompt's file, or the essay.
    pub(crate) fn text(&self) -> Result<String> {
        self.prompt_file.as_deref().map_or_else(|| Ok(include_str!("../prompt.txt").to_string()), read)
    }

    /// Tokens to generate at most.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens.unwrap_or(200)
    }

    /// Tokens of a text to run at most.
    pub(crate) fn text_tokens(&self) -> usize {
        self.tokens.unwrap_or(2048)
    }

    /// What is to become of the keys, where that was asked for.
    pub(crate) fn calibration(&self, heads: Heads) -> Result<Option<KeyCalibration>> {
        let Some(file) = &self.calibration else { return Ok(None) };
        ensure!(self.kv == Format::Int8, "a calibration is for int8: add --kv int8");
        Ok(Some(KeyCalibration::load(file, &self.geometry(heads, self.kv)?)?))
    }

    /// The attention asked for, over a cache for `tokens` tokens.
    pub(crate) fn attention(&self, heads: Heads, tokens: usize) -> Result<Box<dyn Attention>> {
        self.attention_in(heads, tokens, self.kv, self.calibration(heads)?)
    }

    /// The same in another format.
    pub(crate) fn attention_in(
        &self,
        heads: Heads,
        tokens: usize,
        format: Format,
        calibration: Option<KeyCalibration>,
    ) -> Result<Box<dyn Attention>> {
        if let Backend::Plain = self.backend {
            ensure!(!self.room.is_bounded(), "there are no pages that could leave the device: name another backend");
            return Ok(Box::new(Plain::new(heads, format, calibration)));
        }
        let store = self.room.store(self.device()?, self.geometry(heads, format)?, tokens, calibration)?;
        Ok(Box::new(Paged::new(store, heads)?))
    }

    /// The attention asked for, with every page on the device.
    pub(crate) fn resident(&self, heads: Heads) -> Result<Paged> {
        let (geometry, calibration) = (self.geometry(heads, self.kv)?, self.calibration(heads)?);
        Paged::new(Store::resident(self.device()?, geometry, calibration)?, heads)
    }

    fn device(&self) -> Result<Device> {
        Ok(Device::open(&format!("{:?}", self.backend).to_lowercase())?)
    }

    /// The pages of a model with these heads.
    pub(crate) fn geometry(&self, heads: Heads, format: Format) -> Result<Geometry> {
        paged::geometry(heads, format, self.page_size.get())
    }
}
