//! The bench harness as a command of its own; `farfield bench` is the same.
fn main() -> anyhow::Result<()> {
    let code = farfield_bench::cli(std::env::args().skip(1).collect())?;
    std::process::exit(code)
}
