//! How do I run a real model on kvtide? SmolLM2-135M-Instruct by candle, its KV cache by kvtide.

mod args;
mod attention;
mod calibrate;
mod check;
mod counters;
mod evaluate;
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
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use candle_core::quantized::gguf_file::Content;
use clap::Parser;

use crate::args::Args;
use crate::attention::{Attention, Timed};
use crate::generate::{Limits, generate};
use crate::model::Model;
use crate::plain::Plain;
use crate::replay::Recording;
use crate::report::Report;
use crate::tokenizer::ChatTokenizer;

const MODEL: &str = ".models/SmolLM2-135M-Instruct.Q4_1.gguf";
const SYSTEM: &str = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

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

    let of_text = |text: &str| -> Result<Vec<u32>> {
        let mut tokens = tokenizer.encode(text)?;
        tokens.truncate(args.text_tokens().min(model.context_length));
        Ok(tokens)
    };
    if let Some(text) = &args.evaluate {
        return evaluate::evaluate(&args, &model, &of_text(&read(text)?)?, &mut out);
    }
    if let Some(file) = &args.calibrate {
        return calibrate::calibrate(&args, &model, &of_text(&args.text()?)?, file);
    }

    let mut prompt = tokenizer.chat(SYSTEM, &args.prompt()?)?;
    if let Some(file) = &args.record {
        ensure!(args.record_tokens <= prompt.len(), "the prompt has only {} tokens", prompt.len());
        prompt.truncate(args.record_tokens);
        let attention = args.attention(model.heads, prompt.len())?;
        return record::record(&model, &prompt, &args.record_layers, chunk, attention, file);
    }

    let limits = Limits { chunk, tokens: args.tokens(), ignore_end: args.ignore_eos };
    let mut attention = Timed::new(args.attention(model.heads, prompt.len() + args.tokens())?);
    let keep_logits = args.check || args.check_resident;
    let answer = generate(&model, &tokenizer, &prompt, limits, keep_logits, &mut attention, &mut out)?;
    let footprint = attention.footprint()?;
    let check = if args.check {
        let mut plain = Plain::new(model.heads, args.kv, args.calibration(model.heads)?);
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
    let mut plain = Plain::new(recording.heads, args.kv, args.calibration(recording.heads)?);
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
