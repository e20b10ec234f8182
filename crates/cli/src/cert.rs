//! `farfield cert`: certificates for those who have no authority of their own.

use anyhow::{Context, ensure};
use clap::{Args, Subcommand};
use farfield_tls::KeyPin;
use farfield_tls::authority::{Authority, Issued, Purpose, Validity};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Make certificates for memory servers with tls:// and their clients.
///
/// `init` makes an authority. Whoever has its key (ca.key) makes certificates, so keep it off the servers.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CertArgs {
    #[command(subcommand)]
    command: CertCommand,
}

const EXAMPLES: &str = "\
Examples:
  farfield cert init certs                         An authority: certs/ca.pem and certs/ca.key
  farfield cert server certs big 10.0.0.7          For the server that clients call big or 10.0.0.7: certs/big.pem and
                                                   certs/big.key
  farfield cert client certs alice                 For the tenant alice: certs/alice.pem and certs/alice.key
  farfield cert pin certs/big.pem                  The server's public key, for pin= in a URL

A server is given NAME.pem, NAME.key and ca.pem; a client too:
  farfield serve --listen tls://0.0.0.0:7400 --tls-cert big.pem --tls-key big.key --tls-client-ca ca.pem
  farfield run --near 4G --far 'tls://big:7400?ca=ca.pem&cert=alice.pem&key=alice.key' -- ./train";

#[derive(Subcommand, Debug)]
enum CertCommand {
    /// Make an authority in a folder
    Init {
        /// Folder, which is made if it is not there
        folder: PathBuf,
        /// Days for which it is valid
        #[arg(long, value_name = "N", default_value_t = 3650, value_parser = clap::value_parser!(u16).range(1..=36500))]
        days: u16,
    },
    /// Make the certificate of a server
    Server(IssueArgs),
    /// Make the certificate of a client, whose name is that of a tenant
    Client(IssueArgs),
    /// Print the SHA-256 of a certificate's public key
    Pin {
        /// The certificate
        file: PathBuf,
    },
}

#[derive(Args, Debug)]
struct IssueArgs {
    /// Folder of the authority
    folder: PathBuf,
    /// Names and numeric addresses; the first one names the files
    #[arg(required = true)]
    names: Vec<String>,
    /// Days for which it is valid
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u16).range(1..=36500))]
    days: u16,
    /// Replace the files of an earlier certificate with this name
    #[arg(long)]
    replace: bool,
}

pub(crate) fn run(args: &CertArgs) -> anyhow::Result<()> {
    match &args.command {
        CertCommand::Init { folder, days } => init(folder, *days),
        CertCommand::Server(args) => issue(Purpose::Server, args),
        CertCommand::Client(args) => issue(Purpose::Client, args),
        CertCommand::Pin { file } => say(&KeyPin::of_file(file)?.to_string()),
    }
}

fn lasting(days: u16) -> Validity {
    Validity::lasting(Duration::from_secs(u64::from(days) * 86_400))
}

fn init(folder: &Path, days: u16) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let (_, own) = Authority::create(lasting(days))?;
    let [certificate, _] = write(folder, "ca", &own, false)?;
    say(&format!("{}: servers and clients get this file", certificate.display()))
}

fn issue(purpose: Purpose, args: &IssueArgs) -> anyhow::Result<()> {
    let name = args.names.first().context("a certificate needs a name")?;
    ensure!(name != "ca" && !name.contains('/'), "{name:?} cannot name a file here: put another name first");
    let path = args.folder.join("ca.key");
    let key = std::fs::read_to_string(&path).with_context(|| {
        format!("cannot read the authority's key {}: make one with farfield cert init", path.display())
    })?;
    let authority = Authority::from_key(&key).with_context(|| format!("{} is no key", path.display()))?;
    let issued = authority.issue(purpose, &args.names, lasting(args.days));
    let issued = issued.with_context(|| format!("{:?} cannot all be names in a certificate", args.names))?;
    let [certificate, key] = write(&args.folder, name, &issued, args.replace)?;
    let pin = KeyPin::of_file(&certificate)?;
    say(&format!("{} and {}; pin={pin}", certificate.display(), key.display()))
}

/// Writes the files NAME.pem and NAME.key. The key is for this user only, from its first byte on.
fn write(folder: &Path, name: &str, issued: &Issued, replace: bool) -> anyhow::Result<[PathBuf; 2]> {
    let paths = [folder.join(format!("{name}.pem")), folder.join(format!("{name}.key"))];
    let contents = [(&issued.certificate, 0o644), (&issued.key, 0o600)];
    if !replace && let Some(there) = paths.iter().find(|path| path.exists()) {
        anyhow::bail!("{} is there already: remove it, or choose another name", there.display());
    }
    for (path, (text, mode)) in paths.iter().zip(contents) {
        // A file of before may be open to others, or be read right now: a new one takes its place.
        let fresh = path.with_extension("new");
        let written = OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh).and_then(|mut file| {
            let moved = file.write_all(text.as_bytes()).and_then(|()| std::fs::rename(&fresh, path));
            // What is half written would be in the way of the next attempt.
            moved.inspect_err(|_| drop(std::fs::remove_file(&fresh)))
        });
        written.with_context(|| format!("cannot write {} by way of {}", path.display(), fresh.display()))?;
    }
    Ok(paths)
}

fn say(line: &str) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{line}").context("cannot write to stdout")
}
