//! `farfield pages`: writes what packages carry beside the programs, made of the help (feature `pages`).

use anyhow::Context;
use clap::builder::Resettable;
use clap::{Args, Command, CommandFactory};
use clap_complete::{Generator, Shell};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Write man pages and completions into a folder.
#[derive(Args, Debug)]
pub(crate) struct PagesArgs {
    /// Folder, which is made
    folder: PathBuf,
}

/// Writes a man page for the command and one for each subcommand, and completions for three shells.
pub(crate) fn run(args: &PagesArgs) -> anyhow::Result<()> {
    std::fs::create_dir_all(&args.folder).with_context(|| args.folder.display().to_string())?;
    let mut command = crate::Cli::command().disable_help_subcommand(true);
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let mut file = create(&args.folder, &shell.file_name("farfield"))?;
        clap_complete::generate(shell, &mut command, "farfield", &mut file);
    }
    command.build();
    write_man_pages(&args.folder, &command)
}

fn create(folder: &Path, name: &str) -> anyhow::Result<File> {
    let path = folder.join(name);
    File::create(&path).with_context(|| path.display().to_string())
}

/// Writes the man page of this command and those of the commands below it.
fn write_man_pages(folder: &Path, command: &Command) -> anyhow::Result<()> {
    let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let source = concat!("farfield ", env!("CARGO_PKG_VERSION"));
    let command_alone = command.clone().after_help(Resettable::Reset);
    let man = clap_mangen::Man::new(command_alone).section("1").source(source).manual("Farfield");
    let mut file = create(folder, &man.get_filename())?;
    man.render(&mut file)?;
    file.write_all(examples_section(&examples).as_bytes())?;
    let shown = command.get_subcommands().filter(|below| !below.is_hide_set());
    shown.into_iter().try_for_each(|below| write_man_pages(folder, below))
}

/// Returns the text behind the options as a section of a man page, whose lines stay as they are.
fn examples_section(text: &str) -> String {
    let Some(text) = text.strip_prefix("Examples:\n") else { return String::new() };
    let escaped = |line: &str| {
        let line = line.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
        if line.starts_with('.') { format!("\\&{line}\n") } else { format!("{line}\n") }
    };
    format!(".SH EXAMPLES\n.nf\n{}.fi\n", text.lines().map(escaped).collect::<String>())
}

#[cfg(test)]
mod tests {
    //! Danger: lines that the formatter takes for requests, or joins.
    use super::*;

    #[test]
    fn examples_are_not_formatted() {
        let section = examples_section("Examples:\n  farfield run -- a\\b 'x'\n.start of a line\n");
        assert!(section.contains("  farfield run \\-\\- a\\eb \\(aqx\\(aq\n\\&.start"), "{section}");
        assert_eq!(examples_section(""), "");
    }

    #[test]
    fn every_command_has_a_page() {
        let folder = std::env::temp_dir().join(format!("farfield-pages-{}", std::process::id()));
        run(&PagesArgs { folder: folder.clone() }).unwrap();
        for name in ["farfield.1", "farfield-run.1", "farfield-pool-switch.1", "farfield.bash", "_farfield"] {
            assert!(folder.join(name).metadata().unwrap().len() > 500, "{name}");
        }
        assert!(!folder.join("farfield-pages.1").exists(), "it is hidden");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
