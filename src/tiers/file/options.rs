//! How a store file moves its bytes: what a caller may ask for, and what is in use.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Who moves the bytes, as asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineChoice {
    /// The best one that works here.
    #[default]
    Auto,
    /// io_uring, or an error where it does not work.
    Uring,
    /// A pool of threads with positioned reads and writes.
    Threads,
}

/// Whether bytes go past the page cache, as asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DirectChoice {
    /// Where the file system does it.
    #[default]
    Auto,
    /// Through the page cache.
    Never,
    /// Past it, or an error where that does not work.
    Always,
}

/// How a [`StoreFile`](super::StoreFile) moves its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FileOptions {
    /// Who moves the bytes.
    pub engine: EngineChoice,
    /// Whether they go past the page cache.
    pub direct: DirectChoice,
    /// I/Os in flight at once with io_uring: 1 to 4096.
    pub queue_depth: u32,
    /// Threads of the pool where io_uring is not used: 1 to 64.
    pub threads: u32,
}

impl Default for FileOptions {
    fn default() -> Self {
        FileOptions { engine: EngineChoice::Auto, direct: DirectChoice::Auto, queue_depth: 32, threads: 4 }
    }
}

impl FileOptions {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Config`] with the first field that is wrong.
    pub fn validate(&self) -> Result<()> {
        let field = |ok: bool, field, value: u32, rule| {
            if ok { Ok(()) } else { Err(Error::Config { field, value: value.to_string(), rule }) }
        };
        field((1..=4096).contains(&self.queue_depth), "queue_depth", self.queue_depth, "it must be 1 to 4,096")?;
        field((1..=64).contains(&self.threads), "threads", self.threads, "it must be 1 to 64")
    }
}

/// Who moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// io_uring: one thread, many I/Os in flight.
    Uring,
    /// A pool of threads with positioned reads and writes.
    Threads,
}

/// What a store file uses, and why nothing better.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mode {
    /// Who moves the bytes.
    pub engine: Engine,
    /// Whether they go past the page cache.
    pub direct: bool,
    /// What better was not asked for, or was tried and why it did not work; empty when nothing better exists.
    pub reason: String,
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(name(self.engine, self.direct))?;
        if self.reason.is_empty() { Ok(()) } else { write!(f, " ({})", self.reason) }
    }
}

fn name(engine: Engine, direct: bool) -> &'static str {
    match (engine, direct) {
        (Engine::Uring, true) => "io_uring, direct",
        (Engine::Uring, false) => "io_uring, buffered",
        (Engine::Threads, true) => "threads, direct",
        (Engine::Threads, false) => "threads, buffered",
    }
}

/// Tries what the options allow, best first, and says what came out; `Err` has the reason of every try.
pub(super) fn first_that_works<T>(
    options: &FileOptions,
    mut attempt: impl FnMut(Engine, bool) -> Result<T, String>,
) -> Result<(T, Mode), String> {
    let mut reasons: Vec<String> = Vec::new();
    let mut engines = vec![Engine::Uring, Engine::Threads];
    let mut handles = vec![true, false];
    match options.engine {
        EngineChoice::Auto => {}
        EngineChoice::Uring => engines.retain(|&engine| engine == Engine::Uring),
        EngineChoice::Threads => {
            engines.retain(|&engine| engine == Engine::Threads);
            reasons.push("io_uring was not asked for".to_owned());
        }
    }
    match options.direct {
        DirectChoice::Auto => {}
        DirectChoice::Always => handles.retain(|&direct| direct),
        DirectChoice::Never => {
            handles.retain(|&direct| !direct);
            reasons.push("direct I/O was not asked for".to_owned());
        }
    }
    for engine in engines {
        for &direct in &handles {
            match attempt(engine, direct) {
                Ok(it) => return Ok((it, Mode { engine, direct, reason: reasons.join("; ") })),
                Err(reason) => reasons.push(format!("{}: {reason}", name(engine, direct))),
            }
        }
    }
    Err(reasons.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_falls_back_to_the_next_and_keeps_the_reasons() {
        let order = [(Engine::Uring, true), (Engine::Uring, false), (Engine::Threads, true), (Engine::Threads, false)];
        for works in 0..4 {
            let attempt = |engine, direct| {
                let at = order.iter().position(|&step| step == (engine, direct)).unwrap();
                if at >= works { Ok(at) } else { Err(format!("step {at} is not here")) }
            };
            let (at, mode) = first_that_works(&FileOptions::default(), attempt).unwrap();
            assert_eq!((at, (mode.engine, mode.direct)), (works, order[works]));
            assert_eq!(mode.reason.matches("is not here").count(), works, "{mode}");
        }
        let none = first_that_works::<()>(&FileOptions::default(), |_, _| Err("no".into())).unwrap_err();
        assert_eq!(none.matches(": no").count(), 4);
    }

    #[test]
    fn the_options_rule_out_what_they_say() {
        let threads = FileOptions { engine: EngineChoice::Threads, direct: DirectChoice::Never, ..Default::default() };
        let (_, mode) = first_that_works(&threads, |_, _| Ok(())).unwrap();
        assert_eq!((mode.engine, mode.direct), (Engine::Threads, false));
        let always = FileOptions { engine: EngineChoice::Uring, direct: DirectChoice::Always, ..Default::default() };
        let mut tried = Vec::new();
        let outcome = first_that_works::<()>(&always, |engine, direct| {
            tried.push((engine, direct));
            Err("EPERM".into())
        });
        assert_eq!(tried, [(Engine::Uring, true)]);
        assert!(outcome.unwrap_err().contains("EPERM"));
    }

    #[test]
    fn options_are_validated_and_read_from_json() {
        let options: FileOptions = serde_json::from_str(r#"{"engine":"uring","queue_depth":0}"#).unwrap();
        assert_eq!(options.engine, EngineChoice::Uring);
        assert!(matches!(options.validate(), Err(Error::Config { field: "queue_depth", .. })));
        let options = FileOptions { threads: 65, ..Default::default() };
        assert!(matches!(options.validate(), Err(Error::Config { field: "threads", .. })));
        assert!(serde_json::from_str::<FileOptions>(r#"{"depth":1}"#).is_err());
        assert_eq!(FileOptions::default().validate(), Ok(()));
    }
}
