//! Certificates for those who have no authority of their own.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use ring::digest;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Reason why no certificate was made.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A certificate needs a name.
    #[error("a certificate needs a name: give one, or the numeric address of the server")]
    NoName,
    /// The key, or a name, cannot be used.
    #[error("{0}")]
    Unusable(#[from] rcgen::Error),
}

/// Time for which a certificate is valid: from some minutes ago, because clocks differ, until so long from now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Validity {
    not_before: Duration,
    not_after: Duration,
}

impl Validity {
    /// Valid from now on, for that long.
    pub fn lasting(time: Duration) -> Validity {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Validity { not_before: now.saturating_sub(Duration::from_secs(600)), not_after: now + time }
    }

    /// Was valid for that long, until a minute ago.
    pub fn past(time: Duration) -> Validity {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let not_after = now.saturating_sub(Duration::from_secs(60));
        Validity { not_before: not_after.saturating_sub(time), not_after }
    }
}

/// Purpose of a certificate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// A memory server, which clients know by its names.
    Server,
    /// A client, whose name is that of a tenant.
    Client,
}

/// A certificate and its private key, both in PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Issued {
    /// The certificate.
    pub certificate: String,
    /// The private key.
    pub key: String,
}

impl core::fmt::Debug for Issued {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Issued({})", self.certificate)
    }
}

/// An authority: whoever has its key makes certificates.
pub struct Authority {
    params: CertificateParams,
    key: KeyPair,
}

impl core::fmt::Debug for Authority {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Authority").field("name", &self.params.distinguished_name).finish_non_exhaustive()
    }
}

impl Authority {
    /// Makes an authority with a new key, and its own certificate.
    pub fn create(validity: Validity) -> Result<(Authority, Issued), AuthorityError> {
        let authority = Authority::with_key(KeyPair::generate()?, validity);
        let certificate = authority.params.self_signed(&authority.key)?.pem();
        let key = authority.key.serialize_pem();
        Ok((authority, Issued { certificate, key }))
    }

    /// Makes the authority that has this private key, in PEM.
    pub fn from_key(pem: &str) -> Result<Authority, AuthorityError> {
        Ok(Authority::with_key(KeyPair::from_pem(pem)?, Validity::lasting(Duration::ZERO)))
    }

    fn with_key(key: KeyPair, validity: Validity) -> Authority {
        let mut params = params(validity);
        // Its name comes from its key, so that no two authorities have one name.
        let digest = digest::digest(&digest::SHA256, key.public_key_raw());
        let short: String = digest.as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        params.distinguished_name.push(DnType::CommonName, format!("Farfield authority {short}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Authority { params, key }
    }

    /// Makes a certificate with these names, with a new key.
    pub fn issue(&self, purpose: Purpose, names: &[String], validity: Validity) -> Result<Issued, AuthorityError> {
        let first = names.first().ok_or(AuthorityError::NoName)?;
        let key = KeyPair::generate()?;
        let mut params = params(validity);
        params.subject_alt_names = CertificateParams::new(names)?.subject_alt_names;
        params.distinguished_name.push(DnType::CommonName, first.as_str());
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![match purpose {
            Purpose::Server => ExtendedKeyUsagePurpose::ServerAuth,
            Purpose::Client => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        let certificate = params.signed_by(&key, &Issuer::from_params(&self.params, &self.key))?.pem();
        Ok(Issued { certificate, key: key.serialize_pem() })
    }
}

fn params(validity: Validity) -> CertificateParams {
    let mut params = CertificateParams::default();
    // The default has a name in it.
    params.distinguished_name = DistinguishedName::new();
    let epoch = date_time_ymd(1970, 1, 1);
    (params.not_before, params.not_after) = (epoch + validity.not_before, epoch + validity.not_after);
    params
}
