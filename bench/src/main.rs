//! The bench harness: `farfield bench` starts this program.
fn main() -> anyhow::Result<()> {
    let code = farfield_bench::cli(std::env::args().skip(1).collect())?;
    std::process::exit(code)
}
