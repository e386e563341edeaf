//! How do I run a real model on kvtide? SmolLM2-135M-Instruct by candle, its KV cache by kvtide.

mod attention;
mod check;
mod counters;
mod generate;
mod model;
mod paged;
mod plain;
mod record;
mod replay;
mod report;
mod room;
mod store;
#[cfg(test)]
mod tests;
mod tokenizer;

use std::fs::{self, File};
use std::io::{self, BufReader, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use candle_core::quantized::gguf_file::Content;
use clap::{Parser, ValueEnum};
use kvtide::{Device, Geometry};

use crate::attention::{Attention, Heads, Timed};
use crate::generate::{Limits, generate};
use crate::model::Model;
use crate::paged::Paged;
use crate::plain::{Format, Plain};
use crate::replay::Recording;
use crate::report::Report;
use crate::room::Room;
use crate::store::Store;
use crate::tokenizer::ChatTokenizer;

const MODEL: &str = ".models/SmolLM2-135M-Instruct.Q4_1.gguf";
const SYSTEM: &str = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
/// Recitation: every answer token has to be found a thousand tokens back, so a wrong key or value shows at once.
const TASK: &str = "Repeat the text above word for word, from its beginning.";
const PERPLEXITY_TOKENS: usize = 1024;

/// Runs SmolLM2-135M-Instruct on the CPU, with its KV cache and its attention wherever you say.
#[derive(Parser)]
struct Args {
    /// The model's GGUF file [default: the one that scripts/fetch-model leaves in .models]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// A text to repeat [default: an essay on virtual memory]
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// What to say to the model instead
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Tokens to generate at most
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Go on after the end of the answer
    #[arg(long)]
    ignore_eos: bool,
    /// Where the KV cache and the attention live
    #[arg(long, value_enum, default_value = "auto")]
    backend: Backend,
    /// Number format of the KV cache
    #[arg(long, value_enum, default_value = "bf16")]
    kv: Format,
    /// Tokens in a page
    #[arg(long, default_value = "16")]
    page_size: NonZero<usize>,
    /// Tokens of the prompt to run at a time
    #[arg(long, default_value = "256")]
    chunk: NonZero<usize>,
    #[command(flatten)]
    room: Room,
    /// Run it all again through plain contiguous attention and compare
    #[arg(long)]
    check: bool,
    /// Run it all again with every page on the device: each token and each bit of its logits must be the same
    #[arg(long, requires = "kv_budget")]
    check_resident: bool,
    /// Print the final table as one line of JSON
    #[arg(long)]
    json: bool,
    /// Only write the prompt's queries, keys and values to a safetensors file
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Without the model: run what `--record` wrote through the cache and through plain attention, and compare
    #[arg(long, value_name = "FILE", conflicts_with = "record")]
    replay: Option<PathBuf>,
    /// Layers to record
    #[arg(long, value_delimiter = ',', default_value = "0,7,20")]
    record_layers: Vec<usize>,
    /// Tokens of the prompt to record
    #[arg(long, default_value_t = 320)]
    record_tokens: usize,
    /// Only print the perplexity of the first 1,024 tokens of a text
    #[arg(long, value_name = "FILE")]
    perplexity: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Backend {
    Auto,
    Cpu,
    Wgpu,
    Cuda,
    /// No pages: what `--check` compares with
    Plain,
}

impl Args {
    fn prompt(&self) -> Result<String> {
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
    fn attention(&self, heads: Heads, tokens: usize) -> Result<Box<dyn Attention>> {
        if let Backend::Plain = self.backend {
            ensure!(!self.room.is_bounded(), "there are no pages that could leave the device: name another backend");
            return Ok(Box::new(Plain::new(heads, self.kv)));
        }
        let store = self.room.store(self.device()?, self.geometry(heads)?, tokens)?;
        Ok(Box::new(Paged::new(store, heads)?))
    }

    /// The same with every page on the device.
    fn resident(&self, heads: Heads) -> Result<Paged> {
        Paged::new(Store::resident(self.device()?, self.geometry(heads)?)?, heads)
    }

    fn device(&self) -> Result<Device> {
        Ok(Device::open(&format!("{:?}", self.backend).to_lowercase())?)
    }

    fn geometry(&self, heads: Heads) -> Result<Geometry> {
        paged::geometry(heads, self.kv, self.page_size.get())
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(file) = &args.replay {
        return replay(&args, file);
    }
    let path = args.model.clone().map_or_else(find_model, Ok)?;
    let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut file = BufReader::new(file);
    let content = Content::read(&mut file).with_context(|| format!("{} is not a GGUF file", path.display()))?;
    let tokenizer = ChatTokenizer::from_gguf(&content)?;
    let model = Model::load(&content, &mut file)?;
    let chunk = args.chunk.get();
    let mut out = io::stdout();

    if let Some(file) = &args.perplexity {
        let mut tokens = tokenizer.encode(&read(file)?)?;
        tokens.truncate(PERPLEXITY_TOKENS);
        let mut attention = args.attention(model.heads, tokens.len())?;
        let perplexity = check::perplexity(&model, &tokens, chunk, &mut *attention)?;
        writeln!(out, "perplexity {perplexity:.3} over {} tokens", tokens.len())?;
        return Ok(());
    }

    let mut prompt = tokenizer.chat(SYSTEM, &args.prompt()?)?;
    if let Some(file) = &args.record {
        ensure!(args.record_tokens <= prompt.len(), "the prompt has only {} tokens", prompt.len());
        prompt.truncate(args.record_tokens);
        let attention = args.attention(model.heads, prompt.len())?;
        return record::record(&model, &prompt, &args.record_layers, chunk, attention, file);
    }

    let limits = Limits { chunk, tokens: args.tokens, ignore_end: args.ignore_eos };
    let mut attention = Timed::new(args.attention(model.heads, prompt.len() + args.tokens)?);
    let keep_logits = args.check || args.check_resident;
    let answer = generate(&model, &tokenizer, &prompt, limits, keep_logits, &mut attention, &mut out)?;
    let check = if args.check {
        let mut plain = Plain::new(model.heads, args.kv);
        Some(check::replay(&model, &prompt, chunk, &answer, &mut plain)?)
    } else {
        None
    };
    let residence = if args.check_resident {
        let mut resident = args.resident(model.heads)?;
        let again = generate(&model, &tokenizer, &prompt, limits, true, &mut resident, &mut io::sink())?;
        Some(check::residence(prompt.len(), &answer, &again))
    } else {
        None
    };
    let footprint = attention.footprint()?;
    let report = Report::new(footprint, args.kv, prompt.len(), &answer, attention.spent, check, residence);
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        write!(out, "\n{report}")?;
    }
    ensure!(report.tokens_agree(), "the answers through pages and without them differ");
    ensure!(report.bits_agree(), "pages that leave the device change the answer");
    Ok(())
}

/// Compares the two attentions on recorded tensors; an error past what rounding explains ends the program.
fn replay(args: &Args, file: &Path) -> Result<()> {
    let recording = Recording::read(file)?;
    let mut attention = args.attention(recording.heads, recording.tokens)?;
    let mut plain = Plain::new(recording.heads, args.kv);
    let errors = recording.compare(args.chunk.get(), &mut *attention, &mut plain)?;
    let footprint = attention.footprint()?;
    println!(
        "{} on {}: attention over recorded tensors, against plain attention",
        footprint.backend, footprint.adapter
    );
    for error in &errors {
        println!("layer {:<3} relative error {:.1e}", error.layer, error.relative_l2);
    }
    if let Some(swap) = footprint.swap {
        print!("{swap}");
    }
    let close = errors.iter().all(|error| error.relative_l2 < 1e-5);
    ensure!(close && !errors.is_empty(), "attention through pages is not what it should be");
    Ok(())
}

/// Looks for the model below the current folder and below the repository.
fn find_model() -> Result<PathBuf> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut places = [PathBuf::from(MODEL), repository.join(MODEL)].into_iter();
    let found = places.find(|path| path.exists());
    found.with_context(|| format!("no {MODEL}: run scripts/fetch-model, or give --model"))
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}
