//! `farfield cluster users`: makes each user of a cluster a tenant of the memory servers, with a quota and a
//! token of its own.

use crate::size::Size;
use anyhow::{Context, bail, ensure};
use clap::Args;
use farfield_os::serving;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of the token file of memory servers in the folder.
const TENANTS: &str = "tenants";
/// Random bytes of a token.
const TOKEN_BYTES: usize = 16;

/// Give users of a cluster far memory with a quota each.
///
/// Writes the token file of the memory servers, with a tenant for each user, and a file with the token of
/// each user, which only that user can read. Tokens that are there stay as they are, and so do other
/// tenants. Copy the token file to the memory servers and send them SIGHUP.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct UsersArgs {
    /// User with a quota of far memory, or `-` for none: alice=64G. Several times for several users
    #[arg(long, value_name = "NAME=SIZE", required = true, value_parser = quota)]
    quota: Vec<(String, Option<u64>)>,
    /// Folder of the token file `tenants` and of the users' tokens
    #[arg(long, value_name = "FOLDER", default_value = "/etc/farfield/users")]
    folder: PathBuf,
}

const EXAMPLES: &str = "\
Examples:
  farfield cluster users --quota alice=64G --quota bob=32G    Two users, in /etc/farfield/users
  farfield serve --listen tcp://0.0.0.0:7400 --token-file /etc/farfield/users/tenants
  farfield run --agent --token-file /etc/farfield/users/token-$USER -- ./train    In a job: the user's own quota";

/// Writes what is missing or differs.
pub(super) fn run(args: &UsersArgs) -> anyhow::Result<()> {
    fs::create_dir_all(&args.folder).with_context(|| args.folder.display().to_string())?;
    // Others may pass to their own token, and not see who has one.
    fs::set_permissions(&args.folder, Permissions::from_mode(0o711))
        .with_context(|| args.folder.display().to_string())?;
    let path = args.folder.join(TENANTS);
    let before = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let (after, tokens) = tenants(&before, &args.quota, random_token)?;
    let mut said = String::new();
    for (user, token) in &tokens {
        let file = args.folder.join(format!("token-{user}"));
        let line = format!("{token}\n");
        if fs::read_to_string(&file).is_ok_and(|text| text == line) {
            let _ = writeln!(said, "ok     {}", file.display());
            continue;
        }
        write_private(&file, &line, owner(user)?)?;
        let _ = writeln!(said, "writes {}: the token of {user}", file.display());
    }
    // Last, so that nobody's token is valid before the user can read it.
    if after == before {
        let _ = writeln!(said, "ok     {}", path.display());
    } else {
        write_private(&path, &after, None)?;
        let _ = writeln!(said, "writes {}: copy it to the memory servers, and send them SIGHUP", path.display());
    }
    // The write fails if stdout was closed.
    let _ = std::io::stdout().write_all(said.as_bytes());
    Ok(())
}

/// Reads a user and a quota.
fn quota(text: &str) -> Result<(String, Option<u64>), String> {
    let (name, size) = text.split_once('=').ok_or("write NAME=SIZE, like alice=64G")?;
    let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c)) && !name.starts_with(['-', '.']);
    if name.is_empty() || !is_name {
        return Err(format!("{name:?} is no name of a user: letters, digits and _-. only"));
    }
    match size {
        "-" => Ok((name.to_owned(), None)),
        size => match size.parse::<Size>()? {
            Size::Bytes(bytes) if bytes > 0 => Ok((name.to_owned(), Some(bytes))),
            _ => Err("a quota is a size above 0, like 64G, or - for none".to_owned()),
        },
    }
}

/// Returns the token file with these users' quotas, and the token of each user.
fn tenants(
    before: &str,
    quotas: &[(String, Option<u64>)],
    new_token: impl Fn() -> anyhow::Result<String>,
) -> anyhow::Result<(String, BTreeMap<String, String>)> {
    let mut wanted: BTreeMap<&str, Option<u64>> = BTreeMap::new();
    for (name, quota) in quotas {
        ensure!(wanted.insert(name, *quota).is_none(), "--quota {name} is given twice");
    }
    let text = |quota: Option<u64>| quota.map_or("-".to_owned(), |bytes| format!("{bytes}B"));
    let (mut after, mut tokens) = (String::new(), BTreeMap::new());
    for line in before.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let known = words.first().and_then(|name| wanted.remove_entry(name));
        let Some((name, quota)) = known else {
            // Another tenant, or a comment.
            let _ = writeln!(after, "{line}");
            continue;
        };
        let [_, token, _] = words[..] else { bail!("the tenant {name} has no line NAME TOKEN QUOTA") };
        ensure!(token != "-", "the tenant {name} comes in by its certificate: change its quota by hand");
        let _ = writeln!(after, "{name} {token} {}", text(quota));
        tokens.insert(name.to_owned(), token.to_owned());
    }
    for (name, quota) in wanted {
        let token = new_token()?;
        let _ = writeln!(after, "{name} {token} {}", text(quota));
        tokens.insert(name.to_owned(), token);
    }
    Ok((after, tokens))
}

fn random_token() -> anyhow::Result<String> {
    let mut bytes = [0; TOKEN_BYTES];
    serving::fill_random(&mut bytes).context("random bits")?;
    Ok(bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}")))
}

/// Returns the id of a user, whom this machine must know if files are to be theirs.
fn owner(user: &str) -> anyhow::Result<Option<u32>> {
    if serving::effective_uid() != 0 {
        return Ok(None);
    }
    let found = Command::new("id").args(["-u", "--", user]).output().context("cannot run id")?;
    let uid = std::str::from_utf8(&found.stdout).ok().and_then(|text| text.trim().parse().ok());
    ensure!(found.status.success() && uid.is_some(), "this machine knows no user {user}, whose token it would be");
    Ok(uid)
}

/// Replaces a file by one that only its owner can read.
fn write_private(path: &Path, text: &str, owner: Option<u32>) -> anyhow::Result<()> {
    let context = || path.display().to_string();
    let next = path.with_extension("new");
    // What was left by one that was killed.
    fs::remove_file(&next).ok();
    let mut file: File =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&next).with_context(context)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).with_context(context)?;
    if let Some(uid) = owner {
        chown(&next, Some(uid), None).with_context(context)?;
    }
    fs::rename(&next, path).with_context(context)
}

#[cfg(test)]
mod tests {
    //! Danger: a token that changes while jobs use it, a tenant that is lost, and a token that others can read.
    use super::*;

    fn numbered() -> impl Fn() -> anyhow::Result<String> {
        let next = std::cell::Cell::new(0);
        move || {
            next.set(next.get() + 1);
            Ok(format!("t{}", next.get()))
        }
    }

    #[test]
    fn quotas_change_and_tokens_and_other_tenants_stay() {
        let users = |text: &[&str]| text.iter().map(|text| quota(text).unwrap()).collect::<Vec<_>>();
        let (first, tokens) = tenants("# ours\nbatch Zk3 -\n", &users(&["bob=1G", "al.ice=-"]), numbered()).unwrap();
        assert_eq!(first, "# ours\nbatch Zk3 -\nal.ice t1 -\nbob t2 1073741824B\n");
        assert_eq!(tokens["bob"], "t2");
        let (second, tokens) = tenants(&first, &users(&["bob=2G", "carol=1M"]), || Ok("new".into())).unwrap();
        assert_eq!(second, "# ours\nbatch Zk3 -\nal.ice t1 -\nbob t2 2147483648B\ncarol new 1048576B\n");
        assert_eq!(tokens.len(), 2);
        assert_eq!(tenants(&second, &users(&["bob=2G"]), || bail!("no new token")).unwrap().0, second);
        assert!(tenants("", &users(&["bob=1G", "bob=2G"]), numbered()).is_err());
        assert!(tenants("bob -", &users(&["bob=1G"]), numbered()).is_err());
        assert!(tenants("bob - 5G", &users(&["bob=1G"]), numbered()).is_err(), "a tenant of a certificate");
        for wrong in ["bob", "=1G", "bob=0B", "bob=10%", "bob=", "-b=1G", "../b=1G", "b b=1G", "b\n=1G"] {
            assert!(quota(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn files_are_private_and_written_once() {
        let folder = std::env::temp_dir().join(format!("farfield-users-{}", std::process::id()));
        let user = String::from_utf8(Command::new("id").arg("-un").output().unwrap().stdout).unwrap();
        let user = user.trim();
        let args =
            |size: &str| UsersArgs { quota: vec![quota(&format!("{user}={size}")).unwrap()], folder: folder.clone() };
        run(&args("1G")).unwrap();
        let files = [folder.join(TENANTS), folder.join(format!("token-{user}"))];
        let [tenants, token] = files.each_ref().map(|file| fs::read_to_string(file).unwrap());
        assert_eq!(tenants, format!("{user} {} 1073741824B\n", token.trim()));
        assert_eq!(token.trim().len(), 2 * TOKEN_BYTES);
        for file in &files {
            assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
        }
        run(&args("2G")).unwrap();
        assert_eq!(fs::read_to_string(&files[1]).unwrap(), token, "the token stays");
        assert!(fs::read_to_string(&files[0]).unwrap().contains(" 2147483648B"));
        fs::remove_dir_all(folder).unwrap();
    }
}
