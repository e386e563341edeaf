//! How is a table printed? Left-aligned columns as wide as their widest cell, two spaces apart.

use std::fmt::Write;

/// The rows as text, the last column unpadded.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |at: usize| rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
#[test]
fn columns_are_as_wide_as_their_widest_cell() {
    let rows = [vec!["a".to_owned(), "bc".to_owned()], vec!["—de".to_owned(), String::new()]];
    assert_eq!(table(&rows), "a    bc\n—de\n");
}
