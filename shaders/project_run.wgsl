// What is projected? Tokens of one page.

struct ProjectRun {
    frame: u32,
    page: u32,
    slot: u32,
    tokens: u32,
}
