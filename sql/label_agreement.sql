-- The share of 1,000 rows whose nearest other row by cosine has the same label: how much of
-- the label, which training never saw, the embedding keeps.
WITH nearest AS (
  SELECT
    one.id,
    one.label,
    first_value(other.label ORDER BY array_cosine_similarity(one.embedding, other.embedding) DESC) AS nearest_label
  FROM digit_embeddings AS one
  JOIN digit_embeddings AS other ON other.id <> one.id
  WHERE one.id < 1000
  GROUP BY one.id, one.label
)
SELECT count(*) AS rows, avg(CASE WHEN label = nearest_label THEN 1.0 ELSE 0.0 END) AS agreement
FROM nearest
