"""The API's description: types of bodies and answers, the OpenAPI document made of them, and its page. Nothing here parses a request."""
