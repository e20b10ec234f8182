//! Tokens that requests show, and the answer that makes a browser ask for one.

use crate::{WebRequest, WebResponse, text};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ureq_proto::http::{HeaderValue, StatusCode, header};

/// Returns the token that a request shows: that of a program (`Bearer`, RFC 6750), or the password of
/// any user that a browser has asked for (`Basic`, RFC 7617).
pub fn shown_token(request: &WebRequest) -> Option<Vec<u8>> {
    let value = request.headers().get(header::AUTHORIZATION)?.as_bytes();
    let space = value.iter().position(|&byte| byte == b' ')?;
    let (scheme, shown) = (&value[..space], value[space..].trim_ascii());
    if scheme.eq_ignore_ascii_case(b"bearer") {
        return Some(shown.to_vec());
    }
    if !scheme.eq_ignore_ascii_case(b"basic") {
        return None;
    }
    let pair = STANDARD.decode(shown).ok()?;
    let colon = pair.iter().position(|&byte| byte == b':')?;
    Some(pair[colon + 1..].to_vec())
}

/// Makes the response to a request without the right token. A browser asks its user for a password.
pub fn unauthorized(line: &str) -> WebResponse {
    let mut response = text(StatusCode::UNAUTHORIZED, line);
    let challenge = HeaderValue::from_static("Basic realm=\"farfield\", charset=\"UTF-8\"");
    response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
    response
}

#[cfg(test)]
mod tests {
    //! Guards against a token that is read out of something else.
    use super::*;
    use ureq_proto::http::Request;

    fn shown(value: &str) -> Option<Vec<u8>> {
        shown_token(&Request::builder().header("authorization", value).body(Vec::new()).unwrap())
    }

    #[test]
    fn tokens_of_programs_and_passwords_of_browsers_are_found() {
        assert_eq!(shown("Bearer 0123456789abcdef").unwrap(), b"0123456789abcdef");
        assert_eq!(shown("bearer  x ").unwrap(), b"x");
        for (user, password) in [("alice", "0123:4567"), ("", "x"), ("a", "")] {
            let pair = STANDARD.encode(format!("{user}:{password}"));
            assert_eq!(shown(&format!("Basic {pair}")).unwrap(), password.as_bytes());
        }
        for none in ["", "Bearer", "Basic", "Basic !", "Basic YWxpY2U=", "Digest x", "0123456789abcdef"] {
            assert_eq!(shown(none), None, "{none}");
        }
        assert_eq!(shown_token(&Request::builder().body(Vec::new()).unwrap()), None);
    }
}
