//! Does features.md say what the backends report and what Cargo.toml declares?

use kvtide::backend::Operation;
use kvtide::{Backend, Device};
use std::collections::BTreeSet;

const FEATURES: &str = include_str!("../features.md");
const CARGO: &str = include_str!("../Cargo.toml");

/// The rows of the table whose first head cell is `head`: cells by column name, without back-ticks.
fn table(head: &str) -> Vec<Vec<(String, String)>> {
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect()
    };
    let mut lines = FEATURES.lines().skip_while(|line| !line.starts_with(&format!("| {head} ")));
    let names = cells(lines.next().unwrap_or_else(|| panic!("features.md has a table of {head}s")));
    let rows = lines.skip(1).take_while(|line| line.starts_with('|'));
    rows.map(|row| names.iter().cloned().zip(cells(row)).collect()).collect()
}

fn cell<'a>(row: &'a [(String, String)], column: &str) -> &'a str {
    let found = row.iter().find(|(name, _)| name == column);
    found.map(|(_, text)| text.as_str()).unwrap_or_else(|| panic!("features.md has a column {column}"))
}

/// Backends of this build: the names that the table must have, whether there is a device or not.
fn compiled_in() -> BTreeSet<&'static str> {
    let mut names = BTreeSet::from(["cpu"]);
    if cfg!(feature = "wgpu") {
        names.insert("wgpu");
    }
    if cfg!(feature = "cuda") {
        names.insert("cuda");
    }
    names
}

#[test]
fn every_backend_reports_what_its_row_says() {
    let rows = table("backend");
    let named: BTreeSet<&str> = rows.iter().map(|row| cell(row, "backend")).collect();
    assert!(named.is_superset(&compiled_in()), "features.md lacks a backend of {:?}", compiled_in());
    let (devices, _) = Device::all();
    for row in &rows {
        let name = cell(row, "backend");
        let of_backend: Vec<_> = devices.iter().filter(|device| device.caps().backend == name).collect();
        if of_backend.is_empty() {
            eprintln!("{name}: row not checked: no device, or not compiled in");
        }
        for device in of_backend {
            for operation in Operation::ALL {
                let reported = (device.caps().formats)(operation).iter().map(|format| format.name());
                let said = cell(row, operation.name()).split(", ").filter(|format| *format != "none");
                assert_eq!(
                    said.collect::<BTreeSet<_>>(),
                    reported.collect::<BTreeSet<_>>(),
                    "{name} ({}), {}",
                    device.caps().adapter,
                    operation.name()
                );
            }
        }
    }
    assert!(devices.iter().any(|device| device.caps().backend == "cpu"), "the CPU is always checked");
}

#[test]
fn every_cargo_feature_has_a_row_and_every_row_a_cargo_feature() {
    let section = CARGO.split("[features]").nth(1).and_then(|rest| rest.split("\n[").next()).expect("[features]");
    let declared: Vec<(&str, &str)> = section.lines().filter_map(|line| line.split_once(" = ")).collect();
    let default = declared.iter().find(|(name, _)| *name == "default").map_or("", |(_, value)| value);
    let declared: BTreeSet<&str> = declared.iter().map(|(name, _)| *name).filter(|name| *name != "default").collect();
    let rows = table("feature");
    assert_eq!(rows.iter().map(|row| cell(row, "feature")).collect::<BTreeSet<_>>(), declared);
    for row in &rows {
        let name = cell(row, "feature");
        assert_eq!(cell(row, "default") == "yes", default.contains(&format!("\"{name}\"")), "{name}");
    }
    for row in table("backend") {
        let feature = cell(&row, "cargo feature").split(',').next().unwrap_or_default();
        assert!(feature == "always" || declared.contains(feature), "{feature} is no cargo feature");
    }
}
